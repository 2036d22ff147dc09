/* SPDX-License-Identifier: Apache-2.0 */
/* Ethernet frames that carry UDP to a listener: finds the QUIC packet in them, however IP wraps it. */
#ifndef PACED_FRAME_H
#define PACED_FRAME_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LISTENER_PLACES);
	__type(key, __u32);
	__type(value, struct listener);
} paced_listeners SEC(".maps");

/* A packet to a listener. */
struct packet {
	__u64 source[2]; /* the sender's address; IPv4 as IPv4-mapped IPv6 */
	__u16 port;      /* the sender's port, in network order */
	__u8 class;      /* its connection's, or else its listener's */
	__u32 len;       /* of the UDP payload */
	__u32 at;        /* offset of the payload in the frame */
};

/* Functions that the verifier verifies once, wherever they are called (Linux 5.12). Inlined, each path through one would be
 * verified again with each path through the next: 886,641 instructions for the whole program, where a million is the limit. */
#define VERIFIED_ONCE __attribute__((noinline))

enum found {
	ELSEWHERE,       /* not for a listener */
	TO_LISTENER,
	FIRST_FRAGMENT,  /* of a packet to a listener */
	LATER_FRAGMENT,  /* to the address of a listener; its port is in another packet */
	HIDDEN,          /* to the address of a listener, behind too many extension headers or an incomplete one */
};

/* RFC 8200 §4.1 names five before UDP, one of which may occur twice. */
#define MAX_EXTENSION_HEADERS 6

/* Ethernet with two tags, IPv6 with the longest extension headers, and UDP. A mask, because the verifier needs one. */
#define HEADERS_MASK 0x3fff
_Static_assert(22 + 40 + MAX_EXTENSION_HEADERS * 2048 + 8 <= HEADERS_MASK, "headers end before this");

static __always_inline const struct listener *find_listener(const __u64 address[2], __u16 port)
{
	__u32 place = listener_place(address[0], address[1], port);

#pragma unroll
	for (__u32 probe = 0; probe < LISTENER_PROBES; probe++) {
		__u32 at = (place + probe) % LISTENER_PLACES;
		struct listener *listener = bpf_map_lookup_elem(&paced_listeners, &at);

		if (!listener || !listener->in_use)
			return 0;
		if (listener->port == port && listener->address[0] == address[0] && listener->address[1] == address[1])
			return listener;
	}
	return 0;
}

static __always_inline int is_extension_header(__u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING || protocol == IPPROTO_DSTOPTS ||
	       protocol == IPPROTO_FRAGMENT || protocol == IPPROTO_AH;
}

/* How far the headers after that of IPv6 have been read. */
struct headers {
	__u32 at;   /* offset of the next header in the frame */
	__u32 next; /* its protocol */
	enum found found;
};

/* Skips an extension header; returns 0 if the last one has been read, or is incomplete. */
VERIFIED_ONCE int skip_extension_header(struct xdp_md *xdp, struct headers *headers)
{
	__u8 *at = (void *)(long)xdp->data, *end = (void *)(long)xdp->data_end;
	__u32 bytes;

	if (!headers)
		return 0;
	at += headers->at & HEADERS_MASK;
	if (!is_extension_header(headers->next) || at + 8 > end)
		return 0;
	/* RFC 8200 §4.3 to §4.6, RFC 4302 §2.2. */
	bytes = (at[1] + 1) * 8;
	if (headers->next == IPPROTO_AH)
		bytes = (at[1] + 2) * 4;
	if (headers->next == IPPROTO_FRAGMENT) {
		__be16 fragment;

		bytes = 8;
		__builtin_memcpy(&fragment, at + 2, sizeof(fragment));
		if (fragment & bpf_htons(0xfff8))
			headers->found = LATER_FRAGMENT;
		else if (fragment & bpf_htons(1))
			headers->found = FIRST_FRAGMENT;
	}
	headers->next = at[0];
	headers->at += bytes;
	return headers->found != LATER_FRAGMENT;
}

/* Finds UDP to a listener. Sets a length of 0 for a packet that is shorter than its UDP length says. */
static __always_inline enum found find(struct xdp_md *xdp, struct packet *packet)
{
	__u8 *start = (void *)(long)xdp->data, *at = start, *end = (void *)(long)xdp->data_end;
	enum found found = TO_LISTENER;
	const struct listener *listener;
	struct ethhdr *ethernet = (void *)at;
	__u64 address[2] = {};
	struct udphdr *udp;
	__be16 protocol;
	__u32 len, room;

	if (at + sizeof(*ethernet) > end)
		return ELSEWHERE;
	protocol = ethernet->h_proto;
	at += sizeof(*ethernet);
#pragma unroll
	for (int tags = 0; tags < 2; tags++) {
		if (protocol != bpf_htons(ETH_P_8021Q) && protocol != bpf_htons(ETH_P_8021AD))
			break;
		if (at + 4 > end)
			return ELSEWHERE;
		__builtin_memcpy(&protocol, at + 2, sizeof(protocol));
		at += 4;
	}

	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)at;
		__u32 header_bytes;

		if (at + sizeof(*ip) > end || *at >> 4 != 4 || ip->protocol != IPPROTO_UDP)
			return ELSEWHERE;
		header_bytes = (*at & 0xf) * 4;
		if (header_bytes < sizeof(*ip))
			return ELSEWHERE;
		address[1] = (__u64)ip->daddr << 32 | 0xffff0000;
		packet->source[0] = 0;
		packet->source[1] = (__u64)ip->saddr << 32 | 0xffff0000;
		/* The bit for more fragments, and the offset of this one. */
		if (ip->frag_off & bpf_htons(0x3fff))
			found = ip->frag_off & bpf_htons(0x1fff) ? LATER_FRAGMENT : FIRST_FRAGMENT;
		at += header_bytes;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)at;
		struct headers headers = { .found = TO_LISTENER };

		if (at + sizeof(*ip) > end || *at >> 4 != 6)
			return ELSEWHERE;
		headers.next = ip->nexthdr;
		__builtin_memcpy(address, &ip->daddr, sizeof(address));
		__builtin_memcpy(packet->source, &ip->saddr, sizeof(packet->source));
		headers.at = at + sizeof(*ip) - start;
		for (int skipped = 0; headers.next != IPPROTO_UDP && skipped < MAX_EXTENSION_HEADERS; skipped++)
			if (!skip_extension_header(xdp, &headers))
				break;
		found = headers.found;
		at = start + (headers.at & HEADERS_MASK);
		if (headers.next != IPPROTO_UDP) {
			if (!is_extension_header(headers.next))
				return ELSEWHERE;
			if (found != LATER_FRAGMENT)
				found = HIDDEN;
		}
	} else {
		return ELSEWHERE;
	}

	udp = (void *)at;
	if (found == LATER_FRAGMENT || found == HIDDEN || at + sizeof(*udp) > end) {
		/* The kernel drops whole packets without a UDP header; of a fragmented packet, other fragments may contain the rest
		 * of the header. */
		if (found == TO_LISTENER || !find_listener(address, ANY_PORT))
			return ELSEWHERE;
		return found == HIDDEN ? HIDDEN : LATER_FRAGMENT;
	}
	listener = find_listener(address, udp->dest);
	if (!listener)
		return ELSEWHERE;
	if (found == FIRST_FRAGMENT)
		return FIRST_FRAGMENT;
	/* A number and not a pointer: older verifiers do not know the range of two bytes in host order. */
	room = end - at;
	at += sizeof(*udp);
	len = bpf_ntohs(udp->len);
	packet->port = udp->source;
	packet->class = listener->class;
	packet->at = at - start;
	packet->len = len > sizeof(*udp) && len <= room ? len - sizeof(*udp) : 0;
	return TO_LISTENER;
}

#endif
