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
	// module is the module whose version this program reports.
	module = "github.com/quic-go/quic-go"
	// packetBytes is the largest QUIC packet that quic-go sends; other stacks of the experiment start with full packets as
	// well.
	packetBytes = 1452
	// innerPacketBytes is the smallest size that QUIC needs (RFC 9000 §14); inner connections of other stacks have it as
	// well.
	innerPacketBytes = 1200
	// maxStreams is more streams than an experiment opens.
	maxStreams = 1 << 16
	// patience outlasts every experiment: a slow connection must be measured, not closed.
	patience = 5 * time.Minute
)

// protocol names quic-go's version as an ALPN protocol, so that a handshake proves that both ends have the same version.
// A module that replaces quic-go has no such name.
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

// transport returns quic-go's defaults, except for bounds that an experiment would reach.
func transport(initialPacketBytes uint16) *quic.Config {
	return &quic.Config{
		InitialPacketSize:    initialPacketBytes,
		MaxIncomingStreams:   maxStreams,
		HandshakeIdleTimeout: patience,
		MaxIdleTimeout:       patience,
	}
}

// accept listens and serves every stream of every connection.
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

// clientTLS requires the server's version of quic-go, and nothing else.
func clientTLS() (*tls.Config, error) {
	alpn, err := protocol()
	return &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}, err
}
