/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XDP ingress: of the UDP packets to the daemon's own listeners, those that deserve nothing are dropped before they cost a
 * socket buffer. Everything else passes untouched, and so does what is not plainly UDP over IP: fragments, IP options,
 * extension headers.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "connection_id.h"
#include "intf.h"

/* RFC 9000: the version (§15), what a datagram with an Initial has at least (§14.1), connection IDs (§7.2, §17.2), and
 * the shortest packets there are, which are stateless resets (§10.3). */
#define QUIC_VERSION_1 1
#define MIN_INITIAL_BYTES 1200
#define MIN_FIRST_ID_LEN 8
#define MAX_ID_LEN 20
#define MIN_PACKET_BYTES 21

enum long_type { INITIAL, ZERO_RTT, HANDSHAKE, RETRY };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LISTENER_PLACES);
	__type(key, __u32);
	__type(value, struct listener);
} paced_listeners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct limits);
} paced_limits SEC(".maps");

/* When the next first packet from a prefix would be on time. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u64);
} paced_prefixes SEC(".maps");

/* The same for all together: first packets, and those for forgotten connections. */
enum budget { ALL_INITIALS, RESETS, BUDGETS };
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BUDGETS);
	__type(key, __u32);
	__type(value, __u64);
} paced_budgets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASONS);
	__type(key, __u32);
	__type(value, __u64);
} paced_reasons SEC(".maps");

/* A packet to a listener. */
struct packet {
	__u64 prefix; /* of its source */
	__u32 len;    /* of what UDP carries */
	__u8 *quic;
	__u8 *end; /* of the frame, which may be padded */
};

/* Takes one packet's worth of a limit; returns 0 if it is used up. Who loses the race four times is not let in either. */
static __always_inline int take(__u64 *on_time_ns, const struct limit *limit, __u64 now_ns)
{
#pragma unroll
	for (int attempt = 0; attempt < 4; attempt++) {
		__u64 seen_ns = *(volatile __u64 *)on_time_ns;
		__u64 from_ns = seen_ns > now_ns ? seen_ns : now_ns;

		if (from_ns - now_ns > limit->burst_ns)
			return 0;
		if (__sync_val_compare_and_swap(on_time_ns, seen_ns, from_ns + limit->interval_ns) == seen_ns)
			return 1;
	}
	return 0;
}

static __always_inline int take_budget(__u32 which, const struct limit *limit, __u64 now_ns)
{
	__u64 *on_time_ns = bpf_map_lookup_elem(&paced_budgets, &which);

	return on_time_ns && take(on_time_ns, limit, now_ns);
}

/* Judges a packet that begins a connection, or asks for versions. */
static __always_inline enum reason admit(const struct packet *packet, enum reason pass)
{
	__u64 now_ns = bpf_ktime_get_ns(), prefix = packet->prefix;
	__u64 *on_time_ns = bpf_map_lookup_elem(&paced_prefixes, &prefix);
	struct limits *limits;
	__u32 zero = 0;

	limits = bpf_map_lookup_elem(&paced_limits, &zero);
	if (!limits)
		return pass;
	if (on_time_ns) {
		if (!take(on_time_ns, &limits->prefix, now_ns))
			return DROP_PREFIX_LIMIT;
	} else {
		__u64 next_ns = now_ns + limits->prefix.interval_ns;

		bpf_map_update_elem(&paced_prefixes, &prefix, &next_ns, BPF_ANY);
	}
	return take_budget(ALL_INITIALS, &limits->total, now_ns) ? pass : DROP_TOTAL_LIMIT;
}

/* Whether the connection ID at this place, which the packet has room for, is one of ours. */
static __always_inline int is_ours(const __u8 *id)
{
	struct id_label label;

	return id_is_ours(id, &label);
}

/* RFC 9000 §17.3. */
static __always_inline enum reason judge_short(const struct packet *packet)
{
	__u8 *quic = packet->quic;
	struct limits *limits;
	__u32 zero = 0;

	if (quic + MIN_PACKET_BYTES > packet->end || packet->len < MIN_PACKET_BYTES || !(quic[0] & 0x40))
		return DROP_MALFORMED;
	if (is_ours(quic + 1))
		return PASS_CONNECTION;
	limits = bpf_map_lookup_elem(&paced_limits, &zero);
	if (limits && !take_budget(RESETS, &limits->resets, bpf_ktime_get_ns()))
		return DROP_RESET_LIMIT;
	return PASS_UNKNOWN_ID;
}

/* RFC 9000 §17.2; what versions have in common is RFC 8999 §5.1. */
static __always_inline enum reason judge_long(const struct packet *packet)
{
	__u8 *quic = packet->quic, len;
	int is_long_enough = packet->len >= MIN_INITIAL_BYTES, ours;
	__be32 version;

	/* Up to the lengths of two empty IDs. */
	if (quic + 7 > packet->end || packet->len < 7)
		return DROP_MALFORMED;
	__builtin_memcpy(&version, quic + 1, sizeof(version));
	len = quic[5];
	if (!version)
		return DROP_VERSION_NEGOTIATION;
	if (version != bpf_htonl(QUIC_VERSION_1))
		return is_long_enough ? admit(packet, PASS_VERSION) : DROP_SHORT_VERSION;
	if (!(quic[0] & 0x40) || len > MAX_ID_LEN || quic + MIN_PACKET_BYTES > packet->end || packet->len < MIN_PACKET_BYTES)
		return DROP_MALFORMED;
	ours = len == ID_LEN && is_ours(quic + 6);
	switch ((quic[0] & 0x30) >> 4) {
	case INITIAL:
		if (!is_long_enough)
			return DROP_SHORT_INITIAL;
		/* Its first packets carry an ID that the client chose. */
		if (!ours)
			return len < MIN_FIRST_ID_LEN ? DROP_SHORT_ID : admit(packet, PASS_INITIAL);
		return PASS_CONNECTION;
	case ZERO_RTT:
		if (!ours)
			return len < MIN_FIRST_ID_LEN ? DROP_SHORT_ID : admit(packet, PASS_INITIAL);
		return PASS_CONNECTION;
	case HANDSHAKE:
		return ours ? PASS_CONNECTION : DROP_FORGED_ID;
	default:
		/* Only servers send Retry. */
		return DROP_MALFORMED;
	}
}

static __always_inline int is_listener(const __u64 address[2], __u16 port)
{
	__u32 place = listener_place(address[0], address[1], port);

#pragma unroll
	for (__u32 probe = 0; probe < LISTENER_PROBES; probe++) {
		__u32 at = (place + probe) % LISTENER_PLACES;
		struct listener *listener = bpf_map_lookup_elem(&paced_listeners, &at);

		if (!listener || !listener->in_use)
			return 0;
		if (listener->port == port && listener->address[0] == address[0] && listener->address[1] == address[1])
			return 1;
	}
	return 0;
}

/* Finds UDP to a listener; returns 0 for everything else. What is shorter than it says has a length of 0. */
static __always_inline int find(struct xdp_md *xdp, struct packet *packet)
{
	__u8 *at = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u64 address[2] = {};
	struct ethhdr *ethernet = (void *)at;
	struct udphdr *udp;
	__be16 protocol;
	__u32 len, room;

	if (at + sizeof(*ethernet) > end)
		return 0;
	protocol = ethernet->h_proto;
	at += sizeof(*ethernet);
#pragma unroll
	for (int tags = 0; tags < 2; tags++) {
		if (protocol != bpf_htons(ETH_P_8021Q) && protocol != bpf_htons(ETH_P_8021AD))
			break;
		if (at + 4 > end)
			return 0;
		__builtin_memcpy(&protocol, at + 2, sizeof(protocol));
		at += 4;
	}

	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)at;

		/* A version of 4 and five words; neither a fragment nor followed by one. */
		if (at + sizeof(*ip) > end || *at != 0x45 || ip->protocol != IPPROTO_UDP || ip->frag_off & bpf_htons(0x3fff))
			return 0;
		address[1] = (__u64)ip->daddr << 32 | 0xffff0000;
		packet->prefix = bpf_ntohl(ip->saddr) >> 8;
		at += sizeof(*ip);
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)at;
		__be64 network;

		if (at + sizeof(*ip) > end || *at >> 4 != 6 || ip->nexthdr != IPPROTO_UDP)
			return 0;
		__builtin_memcpy(address, &ip->daddr, sizeof(address));
		__builtin_memcpy(&network, &ip->saddr, 8);
		/* The upper 56 bits, and one that no IPv4 prefix has. */
		packet->prefix = bpf_be64_to_cpu(network) >> 8 | 1ull << 63;
		at += sizeof(*ip);
	} else {
		return 0;
	}

	udp = (void *)at;
	if (at + sizeof(*udp) > end)
		return 0;
	if (!is_listener(address, udp->dest))
		return 0;
	/* A number and not a pointer: older verifiers do not know how large two bytes in host order can be. */
	room = end - at;
	at += sizeof(*udp);
	len = bpf_ntohs(udp->len);
	packet->quic = at;
	packet->end = end;
	packet->len = len > sizeof(*udp) && len <= room ? len - sizeof(*udp) : 0;
	return 1;
}

static __always_inline enum reason judge(const struct packet *packet)
{
	if (!packet->len || packet->quic + 1 > packet->end)
		return DROP_MALFORMED;
	return packet->quic[0] & 0x80 ? judge_long(packet) : judge_short(packet);
}

SEC("xdp")
int paced_ingress(struct xdp_md *xdp)
{
	struct packet packet;
	enum reason reason;
	__u64 *count;
	__u32 index;

	if (!find(xdp, &packet))
		return XDP_PASS;
	reason = judge(&packet);
	index = reason;
	count = bpf_map_lookup_elem(&paced_reasons, &index);
	if (count)
		++*count;
	return reason < DROP_MALFORMED ? XDP_PASS : XDP_DROP;
}

/* No helper used here is reserved for programs under the GPL. */
char paced_license[] SEC("license") = "Apache-2.0";
