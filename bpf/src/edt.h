/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Earliest departure times: the arithmetic of sched::pace, free of everything that only a kernel or only a host has.
 * A test holds the two to each other.
 */
#ifndef PACED_EDT_H
#define PACED_EDT_H

#include <linux/types.h>

#define NS_PER_SEC 1000000000ull

/* Farther ahead than this nothing is promised: it would pile up in the qdisc, whose own horizon is later. */
#define EDT_HORIZON_NS NS_PER_SEC

/* How long a packet takes at a rate above 0. Rounds up, so that the rate is never exceeded. Packets have less than 2^34 bytes. */
static inline __u64 edt_length_ns(__u64 bytes, __u64 bytes_per_sec)
{
	return (bytes * NS_PER_SEC + bytes_per_sec - 1) / bytes_per_sec;
}

/* When a packet leaves that could at ready_ns. */
static inline __u64 edt_departure_ns(__u64 next_ns, __u64 ready_ns)
{
	return next_ns > ready_ns ? next_ns : ready_ns;
}

/* When the packet after it may: an idle class gains no more than its burst. */
static inline __u64 edt_next_ns(__u64 next_ns, __u64 ready_ns, __u64 burst_ns, __u64 length_ns)
{
	__u64 earliest_ns = ready_ns > burst_ns ? ready_ns - burst_ns : 0;

	return edt_departure_ns(next_ns, earliest_ns) + length_ns;
}

#endif
