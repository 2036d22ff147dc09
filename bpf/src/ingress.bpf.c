/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XDP ingress: drops UDP packets to the daemon's own listeners that no listener would serve, before they cost a socket
 * buffer. Everything else passes untouched; frame.h finds packets to listeners, and admission.h limits how many pass.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "address_token.h"
#include "admission.h"
#include "connection_id.h"
#include "frame.h"
#include "intf.h"

/* RFC 9000: the version (§15), the shortest datagram with an Initial (§14.1), connection IDs (§7.2, §17.2), and
 * the shortest packets, which are stateless resets (§10.3). */
#define QUIC_VERSION_1 1
#define MIN_INITIAL_BYTES 1200
#define MIN_FIRST_ID_LEN 8
#define MAX_ID_LEN 20
#define MIN_PACKET_BYTES 21

enum long_type { INITIAL, ZERO_RTT, HANDSHAKE, RETRY };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASONS);
	__type(key, __u32);
	__type(value, __u64);
} paced_reasons SEC(".maps");

/* Whether this connection ID is one of ours; the packet then gets its class. The caller has checked that the packet
 * contains it whole. */
static __always_inline int is_ours(struct packet *packet, const __u8 *id)
{
	struct id_label label;

	if (!id_is_ours(id, &label))
		return 0;
	packet->class = label.class;
	return 1;
}

/* RFC 9000 §17.3. */
static __always_inline enum reason judge_short(struct packet *packet, const __u8 *quic, const __u8 *end)
{
	struct limits *limits;
	__u32 zero = 0;

	if (quic + MIN_PACKET_BYTES > end || packet->len < MIN_PACKET_BYTES || !(quic[0] & 0x40))
		return DROP_MALFORMED;
	if (is_ours(packet, quic + 1))
		return PASS_CONNECTION;
	limits = bpf_map_lookup_elem(&paced_limits, &zero);
	if (limits && !take_budget(RESETS, &limits->resets, bpf_ktime_get_ns()))
		return DROP_RESET_LIMIT;
	return PASS_UNKNOWN_ID;
}

/* Whether an Initial shows a token of ours; `at` points behind its first ID. The token's length takes one byte (RFC
 * 9000 §16). */
static __always_inline int shows_token(const struct packet *packet, const __u8 *at, const __u8 *end, __u64 now_ns)
{
	__u8 len;

	if (at + 1 > end)
		return 0;
	len = at[0];
	if (len > MAX_ID_LEN)
		return 0;
	at += 1 + len;
	if (at + 1 + TOKEN_BYTES > end || at[0] != TOKEN_BYTES)
		return 0;
	return token_is_ours(at + 1, packet->source, packet->port, now_ns);
}

/* RFC 9000 §17.2; the parts common to all versions: RFC 8999 §5.1. */
static __always_inline enum reason judge_long(struct packet *packet, const __u8 *quic, const __u8 *end)
{
	int is_long_enough = packet->len >= MIN_INITIAL_BYTES;
	__u64 now_ns, id = 0;
	__be32 version;
	__u8 len, type;

	/* The shortest header: both IDs are empty. */
	if (quic + 7 > end || packet->len < 7)
		return DROP_MALFORMED;
	__builtin_memcpy(&version, quic + 1, sizeof(version));
	len = quic[5];
	if (!version)
		return DROP_VERSION_NEGOTIATION;
	if (version != bpf_htonl(QUIC_VERSION_1))
		return is_long_enough ? admit(packet, 0, 0, 0, bpf_ktime_get_ns()) : DROP_SHORT_VERSION;
	if (!(quic[0] & 0x40) || len > MAX_ID_LEN || quic + MIN_PACKET_BYTES > end || packet->len < MIN_PACKET_BYTES)
		return DROP_MALFORMED;
	type = (quic[0] & 0x30) >> 4;
	if (type == RETRY)
		/* Only servers send Retry. */
		return DROP_MALFORMED;
	if (type == INITIAL && !is_long_enough)
		return DROP_SHORT_INITIAL;
	if (len == ID_LEN && is_ours(packet, quic + 6))
		__builtin_memcpy(&id, quic + 6, sizeof(id));
	if (type == HANDSHAKE)
		return id ? PASS_CONNECTION : DROP_FORGED_ID;
	/* The first packets contain an ID that the client chose. */
	if (!id && len < MIN_FIRST_ID_LEN)
		return DROP_SHORT_ID;
	now_ns = bpf_ktime_get_ns();
	return admit(packet, id, type == INITIAL && shows_token(packet, quic + 6 + len, end, now_ns), 1, now_ns);
}

static __always_inline enum reason judge(struct packet *packet, const __u8 *quic, const __u8 *end)
{
	if (!packet->len || quic + 1 > end)
		return DROP_MALFORMED;
	return quic[0] & 0x80 ? judge_long(packet, quic, end) : judge_short(packet, quic, end);
}

/* Fragments that are not for a listener look the same, so all share a budget. */
static __always_inline enum reason judge_fragment(void)
{
	struct limits *limits;
	__u32 zero = 0;

	limits = bpf_map_lookup_elem(&paced_limits, &zero);
	if (limits && !take_budget(FRAGMENTS, &limits->fragments, bpf_ktime_get_ns()))
		return DROP_FRAGMENT_LIMIT;
	return PASS_FRAGMENT;
}

SEC("xdp")
int paced_ingress(struct xdp_md *xdp)
{
	struct packet packet = {};
	enum reason reason;
	__u8 *start;
	__u64 *count;
	__u32 index;

	switch (find(xdp, &packet)) {
	case TO_LISTENER:
		start = (void *)(long)xdp->data;
		reason = judge(&packet, start + (packet.at & HEADERS_MASK), (void *)(long)xdp->data_end);
		if (reason < PASS_FRAGMENT)
			reason = arrive(&packet, reason);
		break;
	case FIRST_FRAGMENT:
		/* RFC 9000 §14: QUIC packets must not be fragmented. */
		reason = DROP_FRAGMENT;
		break;
	case LATER_FRAGMENT:
		reason = judge_fragment();
		break;
	case HIDDEN:
		reason = DROP_HIDDEN;
		break;
	default:
		return XDP_PASS;
	}
	index = reason;
	count = bpf_map_lookup_elem(&paced_reasons, &index);
	if (count)
		++*count;
	return reason < DROP_MALFORMED ? XDP_PASS : XDP_DROP;
}

/* No helper used here is reserved for programs under the GPL. */
char paced_license[] SEC("license") = "Apache-2.0";
