/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The address tokens that paced sends with Retry. The kernel can check only the stamp in them, which is made for it.
 * The daemon makes tokens:
 *
 *   0      claims, for the daemon only
 *   29..33 time of making: seconds of CLOCK_MONOTONIC, modulo 2^32
 *   33..37 hash of address, port and that time
 *   37..53 tag, for the daemon only
 */
#ifndef PACED_ADDRESS_TOKEN_H
#define PACED_ADDRESS_TOKEN_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "sip_hash.h"

#define TOKEN_BYTES 53
#define TOKEN_STAMP 29
#define TOKEN_GOOD_FOR_SECONDS 10

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct stamp_key);
} paced_stamps SEC(".maps");

/* Whether a token was made for the client that shows it, and recently. The caller has checked that the packet contains
 * it whole. */
static __always_inline int token_is_ours(const __u8 *token, const __u64 address[2], __u16 port, __u64 now_ns)
{
	struct stamp_key *stamps;
	struct sip_state state;
	__u32 zero = 0, made, tag;

	stamps = bpf_map_lookup_elem(&paced_stamps, &zero);
	if (!stamps || !stamps->in_force)
		return 0;
	__builtin_memcpy(&made, token + TOKEN_STAMP, sizeof(made));
	__builtin_memcpy(&tag, token + TOKEN_STAMP + 4, sizeof(tag));
	if ((__u32)(now_ns / 1000000000) - made > TOKEN_GOOD_FOR_SECONDS)
		return 0;
	state = sip_start(stamps->key);
	sip_word(&state, address[0]);
	sip_word(&state, address[1]);
	sip_word(&state, made | (__u64)port << 32 | 22ull << 56);
	return tag == (__u32)sip_end(&state);
}

#endif
