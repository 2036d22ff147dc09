/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sk_reuseport: of the workers' sockets that share an address, selects for each packet that of the worker named in its
 * connection ID. For all other packets the kernel chooses by the hash of addresses and ports, as without this program.
 * A train of packets from one address (GRO) goes whole to the worker in its first ID. The worker drops packets of others.
 */
#include <linux/bpf.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "connection_id.h"
#include "intf.h"

/* The workers' sockets by their number. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u32);
} paced_workers SEC(".maps");

SEC("sk_reuseport")
int paced_steer(struct sk_reuseport_md *packet)
{
	/* The first byte; then the destination's ID, in a long header after the version and a length. */
	__u8 quic[6 + ID_LEN], *id;
	struct id_label label;
	__u32 worker;

	/* Copied, because the payload may not be in the packet's linear part, which is all that can be read directly. */
	if (bpf_skb_load_bytes(packet, sizeof(struct udphdr), quic, sizeof(quic)))
		return SK_PASS;
	if (!(quic[0] & 0x80))
		id = quic + 1;
	else if (quic[5] == ID_LEN)
		id = quic + 6;
	else
		return SK_PASS;
	if (!id_is_ours(id, &label))
		return SK_PASS;
	worker = label.worker;
	/* If there is no such worker, the kernel chooses by hash. */
	bpf_sk_select_reuseport(packet, &paced_workers, &worker, 0);
	return SK_PASS;
}

/* No helper used here is reserved for programs under the GPL. */
char paced_license[] SEC("license") = "Apache-2.0";
