/* SPDX-License-Identifier: Apache-2.0 */
/* The types that programs and their loader share. intf.rs mirrors them, and asserts every size and offset. */
#ifndef PACED_INTF_H
#define PACED_INTF_H

#include <linux/types.h>

/* A mark (skb->mark): tag in the upper half, direction in bits 8 and 9, class in bits 0 to 7; the lower ten bits are the slot. */
#define MARK_TAG_BITS 0xffff0000u
#define SLOTS 768u

/* The terms have two halves: one in force, one that is being written. */
#define HALVES 2u

#define KEEP_PRIORITY 0xffffffffu
#define KEEP_DSCP 0xffu

/* The terms of one slot. */
struct class_terms {
	__u64 bytes_per_sec; /* 0: no limit */
	__u64 burst_ns;
	__u32 priority; /* skb->priority, or KEEP_PRIORITY */
	__u8 dscp;      /* 0 to 63, or KEEP_DSCP */
	__u8 unused[3];
};

/* The counters of one slot, on one CPU. */
struct class_counters {
	__u64 packets; /* each packet of a GSO message counts */
	__u64 bytes;   /* as on the wire: with all headers of all packets */
	__u64 delayed_packets;
	__u64 dropped_packets; /* beyond the horizon */
};

/* Flags of a device, in the map of devices. A device that is not listed has an Ethernet header and no fq. */
#define DEVICE_FQ 1u        /* the root qdisc keeps departure times */
#define DEVICE_NO_ETHERNET 2u /* packets begin with the IP header */

/*
 * An address and port of the daemon: IPv4 as IPv4-mapped IPv6, the port in network order. Listeners are in an array, at
 * the place of their own hash or one of the next: for each packet, an array costs less than the kernel's hash table.
 */
struct listener {
	__u64 address[2];
	__u16 port; /* ANY_PORT: whether anything listens at the address */
	__u16 in_use;
	__u8 class; /* of packets whose connection ID contains none */
	__u8 unused[3];
};

#define ANY_PORT 0u
#define LISTENER_PLACES 2048u
#define LISTENER_PROBES 8u

static inline __u32 listener_place(__u64 address_0, __u64 address_1, __u16 port)
{
	return ((address_0 ^ (address_1 << 32 | address_1 >> 32) ^ port) * 0x9e3779b97f4a7c15ull) >> 53;
}

/* The SipHash-2-4 keys of connection IDs under one config; connection_id.h describes the IDs. */
#define ID_CONFIGS 8u
struct id_keys {
	__u64 tag[2];
	__u64 mask[2];
	__u32 in_force;
	__u32 unused;
};

/* The SipHash-2-4 key of the stamps in address tokens. */
struct stamp_key {
	__u64 key[2];
	__u32 in_force;
	__u32 unused;
};

/* A rate limit by GCRA (ITU-T I.371): one packet every interval_ns, and as many at once as fit into burst_ns. */
struct limit {
	__u64 interval_ns;
	__u64 burst_ns;
};

/* Limits on packets about which nothing is known. */
struct limits {
	struct limit prefix;    /* first packets of connections from one /24 or /56, or from one proven address */
	struct limit total;     /* first packets of connections, in each lane */
	struct limit id;        /* first packets of connections under one ID of ours */
	struct limit resets;    /* packets for connections that may have been forgotten */
	struct limit fragments; /* those without a UDP header to addresses of listeners */
};

/* Connections have classes, which are numbers here. */
#define CLASSES 256u

/* The arrivals of one class, on one CPU: all packets that the rest of the program would pass, shed or not. */
struct arrivals {
	__u64 packets;
	__u64 bytes; /* of UDP payload */
	__u64 shed_packets;
};

/* What happens to a packet to a listener; the index of its counter. */
enum reason {
	PASS_CONNECTION,    /* its connection ID is ours */
	PASS_INITIAL,       /* it begins a connection; so do the next three */
	PASS_INITIAL_TOKEN, /* it shows an address token */
	PASS_INITIAL_KNOWN, /* it comes from where a handshake completed */
	PASS_INITIAL_ID,    /* it is under an ID of ours */
	PASS_VERSION,       /* the endpoint may answer with the versions that it supports */
	PASS_UNKNOWN_ID,    /* the endpoint may answer with a stateless reset */
	PASS_FRAGMENT,      /* it may be for another program at the address */
	DROP_MALFORMED,
	DROP_SHORT_INITIAL,
	DROP_SHORT_ID,
	DROP_VERSION_NEGOTIATION,
	DROP_SHORT_VERSION,
	DROP_FORGED_ID,
	DROP_FRAGMENT,
	DROP_HIDDEN, /* behind extension headers */
	DROP_PREFIX_LIMIT,
	DROP_TOTAL_LIMIT,
	DROP_ID_LIMIT,
	DROP_RESET_LIMIT,
	DROP_FRAGMENT_LIMIT,
	DROP_ARRIVALS_LIMIT, /* too many packets arrive, and its class is too low */
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
LAYOUT(listener, class, 20);
_Static_assert(sizeof(struct id_keys) == 40, "id_keys");
LAYOUT(id_keys, mask, 16);
LAYOUT(id_keys, in_force, 32);
_Static_assert(sizeof(struct stamp_key) == 24, "stamp_key");
LAYOUT(stamp_key, in_force, 16);
_Static_assert(sizeof(struct limits) == 80, "limits");
LAYOUT(limits, total, 16);
LAYOUT(limits, id, 32);
LAYOUT(limits, resets, 48);
LAYOUT(limits, fragments, 64);
_Static_assert(sizeof(struct arrivals) == 24, "arrivals");
LAYOUT(arrivals, bytes, 8);
LAYOUT(arrivals, shed_packets, 16);
_Static_assert(REASONS == 22, "reason");

#endif
