/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Earliest departure times: the arithmetic of sched::pace, independent of kernel and host. A test compares the two.
 */
#ifndef PACED_EDT_H
#define PACED_EDT_H

#include <linux/types.h>

#define NS_PER_SEC 1000000000ull

/* The farthest departure that is given: later packets would pile up in the qdisc, whose own horizon is farther. */
#define EDT_HORIZON_NS NS_PER_SEC

/* How long a packet takes at a rate above 0, rounded up so that the rate is never exceeded. Packets are shorter than
 * 2^34 bytes. */
static inline __u64 edt_length_ns(__u64 bytes, __u64 bytes_per_sec)
{
	return (bytes * NS_PER_SEC + bytes_per_sec - 1) / bytes_per_sec;
}

/* When a packet leaves that is ready at ready_ns. */
static inline __u64 edt_departure_ns(__u64 next_ns, __u64 ready_ns)
{
	return next_ns > ready_ns ? next_ns : ready_ns;
}

/* When the next packet may leave: an idle class gains no more than its burst. */
static inline __u64 edt_next_ns(__u64 next_ns, __u64 ready_ns, __u64 burst_ns, __u64 length_ns)
{
	__u64 earliest_ns = ready_ns > burst_ns ? ready_ns - burst_ns : 0;

	return edt_departure_ns(next_ns, earliest_ns) + length_ns;
}

#endif
