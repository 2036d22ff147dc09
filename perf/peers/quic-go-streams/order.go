package main

import "github.com/quic-go/quic-go"

// order is a stream's priority by RFC 9218, as quic-go implements it: the lowest urgency value goes first; of equal
// ones, incremental streams take turns, and others go in the order of their IDs.
type order struct {
	Urgency     int8 `json:"urgency"`
	Incremental bool `json:"incremental"`
}

const (
	// unordered is the first byte of a stream that keeps quic-go's default priority.
	unordered byte = 0xff
	// incrementalBit is the bit above the three bits of urgency.
	incrementalBit byte = 8
)

// firstByte tells the peer to order its side of the stream in the same way.
func (o *order) firstByte() byte {
	switch {
	case o == nil:
		return unordered
	case o.Incremental:
		return byte(o.Urgency) | incrementalBit
	default:
		return byte(o.Urgency)
	}
}

// apply sets the priority of a stream that a first byte encodes.
func apply(firstByte byte, stream *quic.Stream) {
	if firstByte != unordered {
		stream.SetPriority(int8(firstByte&^incrementalBit), firstByte&incrementalBit != 0)
	}
}
