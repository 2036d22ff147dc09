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

#endif
