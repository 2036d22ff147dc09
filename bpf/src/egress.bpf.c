/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tc egress: gives outgoing packets with paced's mark the priority, the DSCP and the departure time of their class, and
 * counts them. All other packets pass untouched.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "edt.h"
#include "intf.h"

/* The tag of our marks; the loader may set another. */
const volatile __u32 mark_tag = 0x70ac0000;

/* When the next packet of a slot may leave. It outlives a change of terms. */
struct class_clock {
	struct bpf_spin_lock lock;
	__u32 unused;
	__u64 next_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HALVES * SLOTS);
	__type(key, __u32);
	__type(value, struct class_terms);
} paced_terms SEC(".maps");

/* Which half of the terms is in force. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} paced_half SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__type(value, struct class_clock);
} paced_clocks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__type(value, struct class_counters);
} paced_counters SEC(".maps");

/* DEVICE_ flags by interface index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u32);
} paced_devices SEC(".maps");

/* fq on Linux 6.1 sends priorities of 7 (mod 16) at once, whatever their departure time: they become 6. */
static __always_inline __u32 paced_priority(__u32 priority)
{
	return (priority & 15) == 7 ? priority - 1 : priority;
}

/* Whether the first two bytes of an IP header name this version. */
static __always_inline int has_version(__be16 first, __u16 version)
{
	return (first & bpf_htons(0xf000)) == bpf_htons(version << 12);
}

/* Sets the DSCP and keeps the ECN bits; leaves a packet unchanged that is too short for its header, or has no header of its
 * version there: some link headers are neither those of Ethernet nor absent (IP over InfiniBand). */
static __always_inline void set_dscp(struct __sk_buff *skb, __u32 ip_offset, __u8 dscp)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		__be16 old, new;

		/* Version, header length and the old TOS byte: one word of the header's checksum. */
		if (bpf_skb_load_bytes(skb, ip_offset, &old, sizeof(old)) || !has_version(old, 4))
			return;
		new = (old & bpf_htons(0xff03)) | bpf_htons(dscp << 2);
		if (old == new)
			return;
		bpf_l3_csum_replace(skb, ip_offset + 10, old, new, sizeof(new));
		bpf_skb_store_bytes(skb, ip_offset, &new, sizeof(new), 0);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		__be16 old, new;

		/* Version, traffic class, and the first bits of the flow label. No checksum covers them. */
		if (bpf_skb_load_bytes(skb, ip_offset, &old, sizeof(old)) || !has_version(old, 6))
			return;
		new = (old & bpf_htons(0xf03f)) | bpf_htons(dscp << 6);
		if (old != new)
			bpf_skb_store_bytes(skb, ip_offset, &new, sizeof(new), 0);
	}
}

/* Sets the packet's departure time; returns 0 if the class delays it beyond the horizon, and then leaves the class's clock
 * unchanged. The packet takes its place in the class now, even if its socket holds it back: TCP paces its own packets far
 * ahead, and the class's other packets must not wait for them. */
static __always_inline int pace(struct __sk_buff *skb, struct class_clock *clock, const struct class_terms *terms,
				struct class_counters *counters)
{
	__u64 now_ns = bpf_ktime_get_ns(), socket_ns = skb->tstamp, burst_ns = terms->burst_ns;
	__u64 length_ns = edt_length_ns(skb->wire_len, terms->bytes_per_sec);
	__u64 class_ns;
	int within;

	bpf_spin_lock(&clock->lock);
	class_ns = edt_departure_ns(clock->next_ns, now_ns);
	within = class_ns - now_ns <= EDT_HORIZON_NS;
	if (within)
		clock->next_ns = edt_next_ns(clock->next_ns, now_ns, burst_ns, length_ns);
	bpf_spin_unlock(&clock->lock);

	if (!within)
		return 0;
	if (class_ns > edt_departure_ns(socket_ns, now_ns))
		counters->delayed_packets++;
	skb->tstamp = edt_departure_ns(class_ns, socket_ns);
	return 1;
}

SEC("classifier")
int paced_egress(struct __sk_buff *skb)
{
	__u32 slot = skb->mark ^ mark_tag, zero = 0, device = skb->ifindex;
	__u32 *half, *flags, packets, at;
	struct class_counters *counters;
	struct class_terms *terms;
	struct class_clock *clock;

	if (slot >= SLOTS)
		return TC_ACT_UNSPEC;
	half = bpf_map_lookup_elem(&paced_half, &zero);
	counters = bpf_map_lookup_elem(&paced_counters, &slot);
	clock = bpf_map_lookup_elem(&paced_clocks, &slot);
	if (!half || !counters || !clock)
		return TC_ACT_UNSPEC;
	at = (*half % HALVES) * SLOTS + slot;
	terms = bpf_map_lookup_elem(&paced_terms, &at);
	if (!terms)
		return TC_ACT_UNSPEC;

	flags = bpf_map_lookup_elem(&paced_devices, &device);
	packets = skb->gso_segs ? skb->gso_segs : 1;
	if (terms->bytes_per_sec && flags && *flags & DEVICE_FQ && !pace(skb, clock, terms, counters)) {
		counters->dropped_packets += packets;
		return TC_ACT_SHOT;
	}
	counters->packets += packets;
	counters->bytes += skb->wire_len;
	if (terms->priority != KEEP_PRIORITY)
		skb->priority = paced_priority(terms->priority);
	if (terms->dscp != KEEP_DSCP)
		set_dscp(skb, flags && *flags & DEVICE_NO_ETHERNET ? 0 : ETH_HLEN, terms->dscp & 63);
	return TC_ACT_UNSPEC;
}

/* No helper used here is reserved for programs under the GPL. */
char paced_license[] SEC("license") = "Apache-2.0";
