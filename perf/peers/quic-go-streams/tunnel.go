package main

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
)

const (
	// lengthBytes is the size of the length in front of each packet in a stream.
	lengthBytes = 2
	// maxPacketBytes is more than the size of any UDP packet of the experiment.
	maxPacketBytes = 2048
)

// packets is a tunnel with the interface of a socket: packets in a stream, each after its length. A writer waits until
// the stream has room.
type packets struct {
	stream  *quic.Stream
	reader  *bufio.Reader
	writing sync.Mutex
}

func newPackets(stream *quic.Stream) *packets {
	return &packets{stream: stream, reader: bufio.NewReader(stream)}
}

// read reads the next packet into a buffer, which must hold every packet, and returns its length.
func (p *packets) read(buffer []byte) (int, error) {
	var length [lengthBytes]byte
	if _, err := io.ReadFull(p.reader, length[:]); err != nil {
		return 0, err
	}
	count := int(binary.BigEndian.Uint16(length[:]))
	if count > len(buffer) {
		return 0, io.ErrShortBuffer
	}
	return io.ReadFull(p.reader, buffer[:count])
}

// write sends a packet.
func (p *packets) write(packet []byte) error {
	framed := binary.BigEndian.AppendUint16(make([]byte, 0, lengthBytes+len(packet)), uint16(len(packet)))
	framed = append(framed, packet...)
	p.writing.Lock()
	defer p.writing.Unlock()
	_, err := p.stream.Write(framed)
	return err
}

// ReadFrom implements net.PacketConn.
func (p *packets) ReadFrom(buffer []byte) (int, net.Addr, error) {
	count, err := p.read(buffer)
	return count, tunnelEnd, err
}

// WriteTo implements net.PacketConn.
func (p *packets) WriteTo(packet []byte, _ net.Addr) (int, error) {
	return len(packet), p.write(packet)
}

// Close implements net.PacketConn.
func (p *packets) Close() error {
	p.stream.CancelRead(0)
	return p.stream.Close()
}

// LocalAddr implements net.PacketConn.
func (p *packets) LocalAddr() net.Addr { return &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 1} }

// SetDeadline implements net.PacketConn.
func (p *packets) SetDeadline(at time.Time) error { return p.stream.SetDeadline(at) }

// SetReadDeadline implements net.PacketConn.
func (p *packets) SetReadDeadline(at time.Time) error { return p.stream.SetReadDeadline(at) }

// SetWriteDeadline implements net.PacketConn.
func (p *packets) SetWriteDeadline(at time.Time) error { return p.stream.SetWriteDeadline(at) }

// relay carries the packets of each stream to the target and back, over a separate socket.
func relay(listen, target string) error {
	address, err := net.ResolveUDPAddr("udp", target)
	if err != nil {
		return err
	}
	return accept(listen, func(stream *quic.Stream) {
		socket, err := net.DialUDP("udp", nil, address)
		if err != nil {
			stream.CancelRead(0)
			stream.CancelWrite(0)
			return
		}
		carry(stream, socket)
	})
}

// carry ends when the client's side of the stream ends.
func carry(stream *quic.Stream, socket *net.UDPConn) {
	defer socket.Close()
	tunnel := newPackets(stream)
	first, err := tunnel.reader.ReadByte()
	if err != nil {
		return
	}
	apply(first, stream)
	go func() {
		defer stream.Close()
		packet := make([]byte, maxPacketBytes)
		for {
			count, err := socket.Read(packet)
			if err != nil {
				return
			}
			if err := tunnel.write(packet[:count]); err != nil {
				return
			}
		}
	}()
	packet := make([]byte, maxPacketBytes)
	for {
		count, err := tunnel.read(packet)
		if err != nil {
			return
		}
		// A packet that the target refuses is lost, as on any path.
		_, _ = socket.Write(packet[:count])
	}
}
