/* SPDX-License-Identifier: Apache-2.0 */
/* What programs and their loader share. intf.rs mirrors it, and holds every size and offset to it. */
#ifndef PACED_INTF_H
#define PACED_INTF_H

#include <linux/types.h>

/* A mark (skb->mark): tag in the upper half, direction in bit 8, class in bits 0 to 7; the lower nine bits are the slot. */
#define MARK_TAG_BITS 0xffff0000u
#define SLOTS 512u

/* Terms stand in two halves: one in force, one that is being written. */
#define HALVES 2u

#define KEEP_PRIORITY 0xffffffffu
#define KEEP_DSCP 0xffu

/* What packets of one slot are held to. */
struct class_terms {
	__u64 bytes_per_sec; /* 0: no limit */
	__u64 burst_ns;
	__u32 priority; /* skb->priority, or KEEP_PRIORITY */
	__u8 dscp;      /* 0 to 63, or KEEP_DSCP */
	__u8 unused[3];
};

/* What happened to packets of a slot, on one CPU. */
struct class_counters {
	__u64 packets; /* those of a GSO message one by one */
	__u64 bytes;   /* as on the wire: with all headers of all packets */
	__u64 delayed_packets;
	__u64 dropped_packets; /* beyond the horizon */
};

/* What is known about a device, in the map of devices. One that is not listed has an Ethernet header and no fq. */
#define DEVICE_FQ 1u        /* the root qdisc keeps departure times */
#define DEVICE_NO_ETHERNET 2u /* packets begin with the IP header */

/*
 * An address and port that the daemon listens at: IPv4 as IPv4-mapped IPv6, the port in network order. They stand in an
 * array by their own hash, or in one of the places behind it: an array costs a packet less than the kernel's hash table.
 */
struct listener {
	__u64 address[2];
	__u16 port;
	__u16 in_use;
	__u32 unused;
};

#define LISTENER_PLACES 1024u
#define LISTENER_PROBES 8u

static inline __u32 listener_place(__u64 address_0, __u64 address_1, __u16 port)
{
	return ((address_0 ^ (address_1 << 32 | address_1 >> 32) ^ port) * 0x9e3779b97f4a7c15ull) >> 54;
}

/* The SipHash-2-4 keys of connection IDs under one config; connection_id.h says how they are made. */
#define ID_CONFIGS 8u
struct id_keys {
	__u64 tag[2];
	__u64 mask[2];
	__u32 in_force;
	__u32 unused;
};

/* A rate limit by GCRA (ITU-T I.371): one packet every interval_ns, and as many at once as fit into burst_ns. */
struct limit {
	__u64 interval_ns;
	__u64 burst_ns;
};

/* What is let through of packets that nothing is known about. */
struct limits {
	struct limit prefix; /* first packets of connections from one /24 or /56 */
	struct limit total;  /* first packets of connections */
	struct limit resets; /* packets for connections that may have been forgotten */
};

/* What becomes of a packet to a listener; the index of its counter. */
enum reason {
	PASS_CONNECTION, /* its connection ID is ours */
	PASS_INITIAL,    /* it begins a connection */
	PASS_VERSION,    /* the endpoint may answer with the versions that it has */
	PASS_UNKNOWN_ID, /* the endpoint may answer with a stateless reset */
	DROP_MALFORMED,
	DROP_SHORT_INITIAL,
	DROP_SHORT_ID,
	DROP_VERSION_NEGOTIATION,
	DROP_SHORT_VERSION,
	DROP_FORGED_ID,
	DROP_PREFIX_LIMIT,
	DROP_TOTAL_LIMIT,
	DROP_RESET_LIMIT,
	REASONS,
};

/* intf.rs asserts the same numbers. */
#define LAYOUT(type, field, offset) _Static_assert(__builtin_offsetof(struct type, field) == (offset), #field)
_Static_assert(sizeof(struct class_terms) == 24, "class_terms");
LAYOUT(class_terms, bytes_per_sec, 0);
LAYOUT(class_terms, burst_ns, 8);
LAYOUT(class_terms, priority, 16);
LAYOUT(class_terms, dscp, 20);
_Static_assert(sizeof(struct class_counters) == 32, "class_counters");
LAYOUT(class_counters, packets, 0);
LAYOUT(class_counters, bytes, 8);
LAYOUT(class_counters, delayed_packets, 16);
LAYOUT(class_counters, dropped_packets, 24);
_Static_assert(sizeof(struct listener) == 24, "listener");
LAYOUT(listener, port, 16);
LAYOUT(listener, in_use, 18);
_Static_assert(sizeof(struct id_keys) == 40, "id_keys");
LAYOUT(id_keys, mask, 16);
LAYOUT(id_keys, in_force, 32);
_Static_assert(sizeof(struct limits) == 48, "limits");
LAYOUT(limits, total, 16);
LAYOUT(limits, resets, 32);
_Static_assert(REASONS == 13, "reason");

#endif
