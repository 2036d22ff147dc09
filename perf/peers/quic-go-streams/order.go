package main

import "github.com/quic-go/quic-go"

// order is a stream's priority by RFC 9218, as quic-go takes it: the least urgency goes first; of equals, incremental
// streams take turns, and others go by their IDs.
type order struct {
	Urgency     int8 `json:"urgency"`
	Incremental bool `json:"incremental"`
}

const (
	// unordered is the first byte of a stream whose priority stays what quic-go gives it.
	unordered byte = 0xff
	// incrementalBit stands above the three bits of urgency.
	incrementalBit byte = 8
)

// firstByte tells the peer to order its side of the stream alike.
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

// apply gives a stream the order that a first byte stands for.
func apply(firstByte byte, stream *quic.Stream) {
	if firstByte != unordered {
		stream.SetPriority(int8(firstByte&^incrementalBit), firstByte&incrementalBit != 0)
	}
}
