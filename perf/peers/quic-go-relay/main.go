// Command quic-go-relay is a minimal CONNECT-UDP relay (RFC 9298) on quic-go's HTTP/3 server. The benchmarks of paced
// use it as the peer for comparison. It allows every target and requires no token, so it belongs on loopback, where it
// listens by default.
//
// It prints one line of JSON when it is ready, with the version of quic-go, and ends on SIGTERM or SIGINT.
package main

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"paced.example/perf/peers/internal/certificate"
)

const (
	// initialPacketBytes is the QUIC packet size before path MTU discovery: 1200-byte payloads fit from the start, as
	// they do in paced.
	initialPacketBytes = 1400
	// maxTunnels bounds the request streams that one connection may have open.
	maxTunnels = 1 << 16
	// maxIdle outlasts the pauses of a benchmark that measures idle tunnels.
	maxIdle = 5 * time.Minute
)

func main() {
	listen := flag.String("listen", "127.0.0.1:4434", "UDP `address` to serve on")
	certFile := flag.String("cert", "", "certificate chain, PEM `file` (self-signed in memory if empty)")
	keyFile := flag.String("key", "", "private key, PEM `file`")
	flag.Parse()
	if err := serve(*listen, *certFile, *keyFile); err != nil {
		log.Fatal(err)
	}
}

// serve relays until a signal ends it.
func serve(listen, certFile, keyFile string) error {
	identity, err := loadCertificate(certFile, keyFile)
	if err != nil {
		return fmt.Errorf("certificate: %w", err)
	}
	socket, err := net.ListenPacket("udp", listen)
	if err != nil {
		return err
	}
	defer socket.Close()

	server := &http3.Server{
		Handler:         http.HandlerFunc(relay),
		TLSConfig:       &tls.Config{Certificates: []tls.Certificate{identity}},
		EnableDatagrams: true,
		QUICConfig: &quic.Config{
			InitialPacketSize:  initialPacketBytes,
			MaxIncomingStreams: maxTunnels,
			MaxIdleTimeout:     maxIdle,
		},
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-ended
		server.Close()
	}()

	fingerprint := sha256.Sum256(identity.Certificate[0])
	ready := map[string]any{
		"listen":             socket.LocalAddr().String(),
		"pid":                os.Getpid(),
		"certificate_sha256": hex.EncodeToString(fingerprint[:]),
		"stack":              stack(),
	}
	if err := json.NewEncoder(os.Stdout).Encode(ready); err != nil {
		return err
	}
	if err := server.Serve(socket); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// stack names quic-go with the version that this program was built with; it is empty if the build recorded none.
func stack() string {
	build, _ := debug.ReadBuildInfo()
	if build == nil {
		return ""
	}
	for _, module := range build.Deps {
		if module.Path == "github.com/quic-go/quic-go" {
			return "quic-go " + module.Version
		}
	}
	return ""
}

// loadCertificate reads a key pair from files or, if both names are empty, makes a self-signed one for localhost.
func loadCertificate(certFile, keyFile string) (tls.Certificate, error) {
	if certFile != "" || keyFile != "" {
		return tls.LoadX509KeyPair(certFile, keyFile)
	}
	return certificate.SelfSigned()
}
