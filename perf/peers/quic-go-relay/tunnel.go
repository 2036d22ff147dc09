package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"
)

const (
	// datagramCapsule is the type of the capsule that carries an HTTP datagram (RFC 9297 §3.5).
	datagramCapsule http3.CapsuleType = 0
	// udpContext is the context ID of plain UDP payloads (RFC 9298 §4); it takes one byte on the wire.
	udpContext byte = 0
	// maxPayloadBytes is the longest UDP payload that context 0 can carry (RFC 9298 §5).
	maxPayloadBytes = 65527
	// maxDatagramBytes bounds the capsules that the relay accepts: the longest context ID and payload.
	maxDatagramBytes = 8 + maxPayloadBytes
	// quicDatagramBytes holds every HTTP datagram that fits into one of our QUIC packets, which have at most 1452 bytes.
	quicDatagramBytes = 2048
	// socketBufferBytes is the buffer size that a tunnel requests in each direction of its target socket.
	socketBufferBytes = 1 << 20
)

// relay serves one request: it refuses it with a status, or carries its tunnel in both directions until either side
// ends.
func relay(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodConnect {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	if r.Proto != "connect-udp" {
		w.WriteHeader(http.StatusNotImplemented)
		return
	}
	target, err := parseTarget(r.URL.EscapedPath())
	if why, refused := errors.AsType[targetError](err); refused {
		w.WriteHeader(why.status())
		return
	}
	socket, err := dial(target)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer socket.Close()

	// Only the client's SETTINGS tell whether payloads may leave as QUIC datagrams.
	settings := w.(http3.Settingser)
	select {
	case <-settings.ReceivedSettings():
	case <-r.Context().Done():
		return
	}
	w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	w.WriteHeader(http.StatusOK)
	stream, err := w.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		return
	}
	t := &tunnel{stream: stream, socket: socket, datagrams: settings.Settings().EnableDatagrams}
	t.run(r.Context())
}

// dial opens the socket of one tunnel, connected to its target.
func dial(target string) (*net.UDPConn, error) {
	address, err := net.ResolveUDPAddr("udp", target)
	if err != nil {
		return nil, err
	}
	socket, err := net.DialUDP("udp", nil, address)
	if err != nil {
		return nil, err
	}
	// The kernel caps these at its own limits, and no larger ones are possible.
	_ = socket.SetReadBuffer(socketBufferBytes)
	_ = socket.SetWriteBuffer(socketBufferBytes)
	return socket, nil
}

// tunnel joins one request stream with the socket of its target.
type tunnel struct {
	stream *http3.Stream
	socket *net.UDPConn
	// datagrams is true if the client accepts QUIC datagrams; otherwise payloads go to it in capsules.
	datagrams bool
}

// run carries payloads until the client ends the stream, the target's socket fails or a capsule is malformed.
func (t *tunnel) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 3)
	go func() {
		if err := t.datagramsToTarget(ctx); err != nil {
			ended <- err
		}
	}()
	go func() { ended <- t.capsulesToTarget() }()
	go func() { ended <- t.targetToClient() }()

	var code http3.ErrCode
	switch err := <-ended; {
	case errors.Is(err, io.EOF):
		code = http3.ErrCodeNoError
	case errors.Is(err, errMalformedCapsule):
		code = http3.ErrCodeMessageError
	default:
		code = http3.ErrCodeConnectError
	}
	t.stream.CancelRead(quic.StreamErrorCode(code))
	if code == http3.ErrCodeNoError {
		t.stream.Close()
	} else {
		t.stream.CancelWrite(quic.StreamErrorCode(code))
	}
}

// datagramsToTarget forwards payloads that arrive as QUIC datagrams. It returns nil when the stream ends, because only
// capsulesToTarget knows whether it ended well.
func (t *tunnel) datagramsToTarget(ctx context.Context) error {
	for {
		datagram, err := t.stream.ReceiveDatagram(ctx)
		if err != nil {
			return nil
		}
		if err := t.toTarget(datagram); err != nil {
			return err
		}
	}
}

// errMalformedCapsule ends a tunnel whose stream is not a sequence of whole, acceptable capsules.
var errMalformedCapsule = errors.New("malformed capsule")

// capsulesToTarget forwards payloads that arrive in DATAGRAM capsules and skips every other capsule. It returns io.EOF
// at the end of the stream.
func (t *tunnel) capsulesToTarget() error {
	capsules := http3.NewCapsuleParser(t.stream)
	// It grows with the capsules that clients send, and mostly stays empty: most clients send QUIC datagrams.
	var datagram []byte
	for {
		kind, capsule, err := capsules.Next()
		if err == nil && kind != datagramCapsule {
			err = capsule.Discard()
		} else if err == nil {
			length := capsule.Remaining()
			if length > maxDatagramBytes {
				return errMalformedCapsule
			}
			if int64(cap(datagram)) < length {
				datagram = make([]byte, length)
			}
			datagram = datagram[:length]
			if _, err = io.ReadFull(capsule, datagram); err == nil {
				err = t.toTarget(datagram)
			}
		}
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return errMalformedCapsule
		} else if err != nil {
			return err
		}
	}
}

// toTarget sends the payload of one HTTP datagram, or drops it if its context is unknown or it is too long for the path
// to the target.
func (t *tunnel) toTarget(datagram []byte) error {
	context, length, err := quicvarint.Parse(datagram)
	if err != nil || context != uint64(udpContext) {
		return nil
	}
	if len(datagram)-length > maxPayloadBytes {
		return errMalformedCapsule
	}
	if _, err := t.socket.Write(datagram[length:]); err != nil && !errors.Is(err, syscall.EMSGSIZE) {
		return err
	}
	return nil
}

// targetToClient forwards the target's payloads; a payload that does not fit into a QUIC datagram is dropped.
func (t *tunnel) targetToClient() error {
	send, room := t.sendCapsule, maxDatagramBytes
	if t.datagrams {
		send, room = t.stream.SendDatagram, quicDatagramBytes
	}
	datagram := make([]byte, room)
	datagram[0] = udpContext
	for {
		n, err := t.socket.Read(datagram[1:])
		if err != nil {
			return err
		}
		err = send(datagram[:1+n])
		if _, tooLarge := errors.AsType[*quic.DatagramTooLargeError](err); err != nil && !tooLarge {
			return err
		}
	}
}

// sendCapsule sends one HTTP datagram to a client without QUIC datagrams.
func (t *tunnel) sendCapsule(datagram []byte) error {
	capsule := make([]byte, 0, len(datagram)+16)
	capsule = quicvarint.Append(capsule, uint64(datagramCapsule))
	capsule = quicvarint.Append(capsule, uint64(len(datagram)))
	_, err := t.stream.Write(append(capsule, datagram...))
	return err
}
