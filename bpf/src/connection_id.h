/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection IDs that paced issues, as the kernel reads them. The daemon makes them:
 *
 *   0      config in the upper three bits, length less one in the lower five
 *   1..6   nonce
 *   6..8   class and worker, hidden by a hash of nonce and tag
 *   8..12  tag: a hash of all other bytes, with class and worker in clear
 */
#ifndef PACED_CONNECTION_ID_H
#define PACED_CONNECTION_ID_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "intf.h"
#include "sip_hash.h"

#define ID_LEN 12

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

/* The keys, by their config. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ID_CONFIGS);
	__type(key, __u32);
	__type(value, struct id_keys);
} paced_ids SEC(".maps");

/* Reads the label of a connection ID; returns 0 if it is not one of ours. */
static __always_inline int id_is_ours(const __u8 *id, struct id_label *label)
{
	__u32 config = id_config(id[0]);
	struct id_keys *keys = bpf_map_lookup_elem(&paced_ids, &config);

	return keys && keys->in_force && id_open(id, keys, label);
}

#endif
