package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
)

// toBeMade is a request of the experiment.
type toBeMade struct {
	// Bytes is how many bytes it sends, and receives back.
	Bytes int `json:"bytes"`
	// StartNs is its start, in nanoseconds after the connection is open.
	StartNs int64 `json:"start_ns"`
	// Order is the priority of its stream; nil for quic-go's default.
	Order *order `json:"order"`
}

// outcome is a line about the outcome of a request.
type outcome struct {
	Request int `json:"request"`
	// LatencyNs counts from the request's start to the last byte of its echo.
	LatencyNs *int64 `json:"latency_ns"`
	// Error says why there is no latency; empty if the time was up.
	Error string `json:"error,omitempty"`
}

// readRequests reads a JSON array.
func readRequests(file string) ([]toBeMade, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var requests []toBeMade
	if err := json.Unmarshal(text, &requests); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for index, request := range requests {
		if request.Bytes < 1 {
			return nil, fmt.Errorf("%s: request %d has no bytes", file, index)
		}
	}
	return requests, nil
}

// opener begins a request at its start; the function that it returns ends when the request has ended.
type opener func(context.Context, toBeMade) (func() error, error)

// request makes all requests over one connection to the server, or each in a tunnel through one connection to a relay, and
// prints a line for each and one for all.
func request(server string, tunnelled bool, requests []toBeMade, limit time.Duration) error {
	security, err := clientTLS()
	if err != nil {
		return err
	}
	connection, err := quic.DialAddr(context.Background(), server, security, transport(packetBytes))
	if err != nil {
		return err
	}
	open := overStreams(connection)
	if tunnelled {
		open = overTunnels(connection)
	}
	began := time.Now()
	outcomes, err := makeAll(requests, began.Add(limit), open)
	if err != nil {
		return err
	}
	total := time.Since(began)
	lines := json.NewEncoder(os.Stdout)
	for _, line := range outcomes {
		if err := lines.Encode(line); err != nil {
			return err
		}
	}
	negotiated := connection.ConnectionState().TLS.NegotiatedProtocol
	if err := lines.Encode(map[string]any{"protocol": negotiated, "total_ns": total.Nanoseconds()}); err != nil {
		return err
	}
	return connection.CloseWithError(0, "")
}

// makeAll begins each request at its start, in order, and waits until all have ended.
func makeAll(requests []toBeMade, deadline time.Time, open opener) ([]outcome, error) {
	began := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	outcomes := make([]outcome, len(requests))
	var pending sync.WaitGroup
	for index, request := range requests {
		outcomes[index].Request = index
		start := began.Add(time.Duration(request.StartNs))
		select {
		case <-time.After(time.Until(start)):
		case <-ctx.Done():
			continue
		}
		finish, err := open(ctx, request)
		if err != nil {
			if ctx.Err() != nil {
				continue
			}
			return nil, err
		}
		pending.Go(func() {
			err := finish()
			if latency := time.Since(start).Nanoseconds(); err == nil {
				outcomes[index].LatencyNs = &latency
			} else if ctx.Err() == nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				outcomes[index].Error = err.Error()
			}
		})
	}
	pending.Wait()
	return outcomes, nil
}

// overStreams makes requests as streams of one connection.
func overStreams(connection *quic.Conn) opener {
	return func(ctx context.Context, request toBeMade) (func() error, error) {
		stream, err := connection.OpenStreamSync(ctx)
		if err != nil {
			return nil, err
		}
		return func() error { return exchange(ctx, stream, request) }, nil
	}
}

// exchange sends a request's bytes over a stream and waits until all have come back.
func exchange(ctx context.Context, stream *quic.Stream, request toBeMade) error {
	first := request.Order.firstByte()
	apply(first, stream)
	if deadline, bounded := ctx.Deadline(); bounded {
		if err := stream.SetDeadline(deadline); err != nil {
			return err
		}
	}
	body := bytes.Repeat([]byte{1}, request.Bytes)
	body[0] = first
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Write(body)
		if err == nil {
			err = stream.Close()
		}
		sent <- err
	}()
	back, err := io.ReadAll(io.LimitReader(stream, int64(request.Bytes)+1))
	if err != nil {
		return err
	}
	if !bytes.Equal(back, body) {
		return errors.New("the echo of a request is not what was sent")
	}
	return <-sent
}

// overTunnels makes each request over its own connection, whose packets travel in a stream of the connection to the relay.
// The request's priority is that of this stream.
func overTunnels(relay *quic.Conn) opener {
	security, err := clientTLS()
	return func(ctx context.Context, request toBeMade) (func() error, error) {
		if err != nil {
			return nil, err
		}
		outer, err := relay.OpenStreamSync(ctx)
		if err != nil {
			return nil, err
		}
		return func() error {
			first := request.Order.firstByte()
			apply(first, outer)
			if _, err := outer.Write([]byte{first}); err != nil {
				return err
			}
			carrier := &quic.Transport{Conn: newPackets(outer)}
			defer carrier.Close()
			connection, err := carrier.Dial(ctx, tunnelEnd, security, transport(innerPacketBytes))
			if err != nil {
				return err
			}
			defer connection.CloseWithError(0, "")
			stream, err := connection.OpenStreamSync(ctx)
			if err != nil {
				return err
			}
			return exchange(ctx, stream, toBeMade{Bytes: request.Bytes})
		}, nil
	}
}

// tunnelEnd stands for the target, whose address only the relay knows.
var tunnelEnd net.Addr = &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 443}
