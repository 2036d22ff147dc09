/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of the tc egress program, compiled for this machine and callable from a test. */
#include "edt.h"

/* Sends one packet as the program does: returns its departure and moves the clock. */
__u64 edt_send(__u64 *next_ns, __u64 ready_ns, __u64 bytes, __u64 bytes_per_sec, __u64 burst_ns)
{
	__u64 departure_ns = edt_departure_ns(*next_ns, ready_ns);

	*next_ns = edt_next_ns(*next_ns, ready_ns, burst_ns, edt_length_ns(bytes, bytes_per_sec));
	return departure_ns;
}

__u64 edt_horizon_ns(void)
{
	return EDT_HORIZON_NS;
}
