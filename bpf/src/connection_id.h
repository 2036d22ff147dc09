/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection IDs that paced issues, read in the kernel. The daemon makes them:
 *
 *   0      config in the upper three bits, length less one in the others
 *   1..6   nonce
 *   6..8   class and worker, hidden by a hash of nonce and tag
 *   8..12  tag: a hash of all the others, class and worker in clear
 */
#ifndef PACED_CONNECTION_ID_H
#define PACED_CONNECTION_ID_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"

#define ID_LEN 12

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "SipHash reads words in this order");

#define SIP_ROTATE(word, bits) ((word) << (bits) | (word) >> (64 - (bits)))
#define SIP_ROUND(a, b, c, d)                                                                       \
	do {                                                                                        \
		a += b; b = SIP_ROTATE(b, 13); b ^= a; a = SIP_ROTATE(a, 32);                       \
		c += d; d = SIP_ROTATE(d, 16); d ^= c;                                              \
		a += d; d = SIP_ROTATE(d, 21); d ^= a;                                              \
		c += b; b = SIP_ROTATE(b, 17); b ^= c; c = SIP_ROTATE(c, 32);                       \
	} while (0)

/* SipHash-2-4 (Aumasson and Bernstein 2012) of 8 to 15 bytes: the first word, and the last with the length on top. */
static inline __u64 sip_hash(const __u64 key[2], __u64 first, __u64 last)
{
	__u64 a = key[0] ^ 0x736f6d6570736575, b = key[1] ^ 0x646f72616e646f6d;
	__u64 c = key[0] ^ 0x6c7967656e657261, d = key[1] ^ 0x7465646279746573;

	d ^= first;
	SIP_ROUND(a, b, c, d);
	SIP_ROUND(a, b, c, d);
	a ^= first;
	d ^= last;
	SIP_ROUND(a, b, c, d);
	SIP_ROUND(a, b, c, d);
	a ^= last;
	c ^= 0xff;
	SIP_ROUND(a, b, c, d);
	SIP_ROUND(a, b, c, d);
	SIP_ROUND(a, b, c, d);
	SIP_ROUND(a, b, c, d);
	return a ^ b ^ c ^ d;
}

struct id_label {
	__u8 class;
	__u8 worker;
};

/* The config of a connection ID, by its first byte. */
static inline __u32 id_config(__u8 first)
{
	return first >> 5;
}

/* Reads the label of a connection ID; returns 0 if it was not made with these keys. */
static inline int id_open(const __u8 id[ID_LEN], const struct id_keys *keys, struct id_label *label)
{
	__u64 head, nonce, mask;
	__u32 tag;

	__builtin_memcpy(&head, id, sizeof(head));
	__builtin_memcpy(&tag, id + 8, sizeof(tag));
	nonce = head << 16 >> 24;
	mask = sip_hash(keys->mask, nonce | (__u64)tag << 40, tag >> 24 | 9ull << 56);
	head ^= mask << 48;
	label->class = head >> 48;
	label->worker = head >> 56;
	return tag == (__u32)sip_hash(keys->tag, head, 8ull << 56);
}

/* The keys by the config that names them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ID_CONFIGS);
	__type(key, __u32);
	__type(value, struct id_keys);
} paced_ids SEC(".maps");

/* Reads the label of a connection ID; returns 0 if it is none of ours. */
static __always_inline int id_is_ours(const __u8 *id, struct id_label *label)
{
	__u32 config = id_config(id[0]);
	struct id_keys *keys = bpf_map_lookup_elem(&paced_ids, &config);

	return keys && keys->in_force && id_open(id, keys, label);
}

#endif
