package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/quic-go/quic-go"

	"paced.example/perf/peers/internal/certificate"
)

const (
	// module is what this program says the version of.
	module = "github.com/quic-go/quic-go"
	// packetBytes is the largest size of a QUIC packet that quic-go has; other stacks of the experiment begin with full
	// packets as well.
	packetBytes = 1452
	// innerPacketBytes is the smallest size that QUIC needs (RFC 9000 §14), which inner connections of other stacks have.
	innerPacketBytes = 1200
	// maxStreams is more than an experiment opens.
	maxStreams = 1 << 16
	// patience outlasts every experiment: what is slow is to be measured, and not to be given up.
	patience = 5 * time.Minute
)

// protocol names quic-go's version as an ALPN protocol, so that a handshake proves that both ends have the same. A module
// that stands in for quic-go has no such name.
func protocol() (string, error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "", errors.New("this program does not know what it was built of")
	}
	for _, built := range info.Deps {
		if built.Path == module && built.Replace == nil {
			return "quic-go/" + built.Version, nil
		}
	}
	return "", fmt.Errorf("this program was not built of %s itself", module)
}

// transport returns quic-go's defaults but for bounds that an experiment would meet.
func transport(initialPacketBytes uint16) *quic.Config {
	return &quic.Config{
		InitialPacketSize:    initialPacketBytes,
		MaxIncomingStreams:   maxStreams,
		HandshakeIdleTimeout: patience,
		MaxIdleTimeout:       patience,
	}
}

// accept listens and has every stream of every connection served.
func accept(listen string, serve func(*quic.Stream)) error {
	alpn, err := protocol()
	if err != nil {
		return err
	}
	identity, err := certificate.SelfSigned()
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	security := &tls.Config{Certificates: []tls.Certificate{identity}, NextProtos: []string{alpn}}
	listener, err := quic.ListenAddr(listen, security, transport(packetBytes))
	if err != nil {
		return err
	}
	ready := map[string]string{"listen": listener.Addr().String(), "protocol": alpn}
	if err := json.NewEncoder(os.Stdout).Encode(ready); err != nil {
		return err
	}
	for {
		connection, err := listener.Accept(context.Background())
		if err != nil {
			return err
		}
		go func() {
			for {
				stream, err := connection.AcceptStream(context.Background())
				if err != nil {
					return
				}
				go serve(stream)
			}
		}()
	}
}

// clientTLS asks for the server's version of quic-go, and for nothing else.
func clientTLS() (*tls.Config, error) {
	alpn, err := protocol()
	return &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}, err
}
