/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Limits on packets about which nothing, or little, is known. Packets that begin a connection use lanes, each with its
 * own budget, so that a packet that proves something does not share its budget with packets from forged addresses:
 *
 *   lane       packets in it                                  each limited by
 *   TOKENS     show an address token with our stamp           the prefix limit, per address
 *   IDS        are under an ID of ours                        the ID limit
 *   KNOWN      come from where a handshake completed          the prefix limit, per address
 *   STRANGERS  all                                            the prefix limit, per prefix
 *
 * A packet whose lane is used up tries the next lane that it may use, unless it is beyond the limit of its own ID: then it is dropped.
 */
#ifndef PACED_ADMISSION_H
#define PACED_ADMISSION_H

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "frame.h"
#include "intf.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct limits);
} paced_limits SEC(".maps");

/* By prefix: when its next first packet would be on time. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u64);
} paced_prefixes SEC(".maps");

/* The same for a proven address or ID. In a separate map, because forged prefixes arrive at line rate and evict each
 * other. */
enum lane { TOKENS, IDS, KNOWN, STRANGERS };
struct proof {
	__u64 what; /* an address, or the first bytes of an ID */
	__u64 lane;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct proof);
	__type(value, __u64);
} paced_proofs SEC(".maps");

/* By address: when the daemon last noted a completed handshake from it, by CLOCK_MONOTONIC. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u64);
} paced_known SEC(".maps");

#define KNOWN_FOR_NS (24 * 3600 * 1000000000ull)

/* The same for all packets of a lane, and of other purposes. Each in its own cache line. */
enum budget { RESETS = STRANGERS + 1, FRAGMENTS, ARRIVALS, BUDGETS };
struct budget_clock {
	__u64 on_time_ns;
	__u64 unused[7];
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BUDGETS);
	__type(key, __u32);
	__type(value, struct budget_clock);
} paced_budgets SEC(".maps");

/* By class: its arrivals, and the depth of the budget at which it is shed. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CLASSES);
	__type(key, __u32);
	__type(value, struct arrivals);
} paced_arrivals SEC(".maps");
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CLASSES);
	__type(key, __u32);
	__type(value, struct limit);
} paced_classes SEC(".maps");

static __always_inline int is_used_up(__u64 on_time_ns, const struct limit *limit, __u64 now_ns)
{
	return on_time_ns > now_ns && on_time_ns - now_ns > limit->burst_ns;
}

/* Takes one packet from a limit; returns 0 if it is used up, and `lost` if other CPUs were faster four times. */
VERIFIED_ONCE int take(__u64 *on_time_ns, const struct limit *limit, __u64 now_ns, int lost)
{
	if (!on_time_ns || !limit)
		return 0;
#pragma unroll
	for (int attempt = 0; attempt < 4; attempt++) {
		__u64 seen_ns = *(volatile __u64 *)on_time_ns;
		__u64 from_ns = seen_ns > now_ns ? seen_ns : now_ns;

		if (is_used_up(seen_ns, limit, now_ns))
			return 0;
		if (__sync_val_compare_and_swap(on_time_ns, seen_ns, from_ns + limit->interval_ns) == seen_ns)
			return 1;
	}
	return lost;
}

static __always_inline int take_budget(__u32 which, const struct limit *limit, __u64 now_ns)
{
	struct budget_clock *budget = bpf_map_lookup_elem(&paced_budgets, &which);

	return budget && take(&budget->on_time_ns, limit, now_ns, 0);
}

/* The same for one entry of a map, which is created if it does not exist. */
static __always_inline int take_one(void *entries, const void *key, const struct limit *limit, __u64 now_ns)
{
	__u64 *on_time_ns = bpf_map_lookup_elem(entries, key), next_ns = now_ns + limit->interval_ns;

	if (on_time_ns)
		return take(on_time_ns, limit, now_ns, 0);
	bpf_map_update_elem(entries, key, &next_ns, BPF_ANY);
	return 1;
}

/* An IPv6 address: its upper half. An IPv4 address: the lower half of its IPv6-mapped form, which begins with 16 zero bits, as
 * no global IPv6 address does. */
static __always_inline __u64 host_of(const __u64 source[2])
{
	return source[0] ? source[0] : source[1];
}

/* An IPv4 /24, or an IPv6 /56 with one bit that no IPv4 prefix has. */
static __always_inline __u64 prefix_of(const __u64 source[2])
{
	return source[0] ? bpf_be64_to_cpu(source[0]) >> 8 | 1ull << 63 : bpf_ntohl(source[1] >> 32) >> 8;
}

/*
 * Judges a packet that begins a connection, or asks for versions. `id` is the first bytes of its ID if that is one of
 * ours, else 0; `has_token` says whether it shows a token of ours.
 */
VERIFIED_ONCE enum reason admit(const struct packet *packet, __u64 id, int has_token, int is_initial, __u64 now_ns)
{
	__u32 zero = 0, strangers = STRANGERS;
	struct budget_clock *budget;
	struct limits *limits;
	__u64 prefix, *since_ns;
	struct proof proof;

	if (!packet)
		return DROP_MALFORMED;
	proof.what = host_of(packet->source);
	limits = bpf_map_lookup_elem(&paced_limits, &zero);
	budget = bpf_map_lookup_elem(&paced_budgets, &strangers);
	if (!limits || !budget)
		return DROP_TOTAL_LIMIT;
	if (has_token) {
		proof.lane = TOKENS;
		if (take_one(&paced_proofs, &proof, &limits->prefix, now_ns) &&
		    take_budget(TOKENS, &limits->total, now_ns))
			return PASS_INITIAL_TOKEN;
	}
	if (id) {
		struct proof shown = { .what = id, .lane = IDS };

		if (!take_one(&paced_proofs, &shown, &limits->id, now_ns))
			return DROP_ID_LIMIT;
		if (take_budget(IDS, &limits->total, now_ns))
			return PASS_INITIAL_ID;
	}
	since_ns = bpf_map_lookup_elem(&paced_known, &proof.what);
	if (since_ns && now_ns - *since_ns < KNOWN_FOR_NS) {
		proof.lane = KNOWN;
		if (take_one(&paced_proofs, &proof, &limits->prefix, now_ns) &&
		    take_budget(KNOWN, &limits->total, now_ns))
			return is_initial ? PASS_INITIAL_KNOWN : PASS_VERSION;
	}
	/* Before the prefix limit: in a flood from everywhere, no prefix is stored for a packet that would not pass anyway. */
	if (is_used_up(*(volatile __u64 *)&budget->on_time_ns, &limits->total, now_ns))
		return DROP_TOTAL_LIMIT;
	prefix = prefix_of(packet->source);
	if (!take_one(&paced_prefixes, &prefix, &limits->prefix, now_ns))
		return DROP_PREFIX_LIMIT;
	if (!take(&budget->on_time_ns, &limits->total, now_ns, 0))
		return DROP_TOTAL_LIMIT;
	return is_initial ? PASS_INITIAL : PASS_VERSION;
}

/*
 * Counts a packet that passes, by class, and sheds it if too many arrive: the lower a class is, the less of the burst
 * it may use, so the lowest class finds nothing left first, and the highest gets what the others leave.
 */
static __always_inline enum reason arrive(const struct packet *packet, enum reason reason)
{
	__u32 class = packet->class, all = ARRIVALS;
	struct arrivals *arrivals = bpf_map_lookup_elem(&paced_arrivals, &class);
	struct limit *limit = bpf_map_lookup_elem(&paced_classes, &class);
	struct budget_clock *budget = bpf_map_lookup_elem(&paced_budgets, &all);

	if (!arrivals || !limit || !budget)
		return reason;
	arrivals->packets++;
	arrivals->bytes += packet->len;
	if (!limit->interval_ns || take(&budget->on_time_ns, limit, bpf_ktime_get_ns(), 1))
		return reason;
	arrivals->shed_packets++;
	return DROP_ARRIVALS_LIMIT;
}

#endif
