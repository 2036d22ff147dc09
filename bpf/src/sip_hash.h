/* SPDX-License-Identifier: Apache-2.0 */
/* SipHash-2-4 (Aumasson and Bernstein 2012), word by word. */
#ifndef PACED_SIP_HASH_H
#define PACED_SIP_HASH_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "SipHash reads words in this order");

struct sip_state {
	__u64 a, b, c, d;
};

#define SIP_ROTATE(word, bits) ((word) << (bits) | (word) >> (64 - (bits)))

static __always_inline void sip_round(struct sip_state *s)
{
	s->a += s->b; s->b = SIP_ROTATE(s->b, 13); s->b ^= s->a; s->a = SIP_ROTATE(s->a, 32);
	s->c += s->d; s->d = SIP_ROTATE(s->d, 16); s->d ^= s->c;
	s->a += s->d; s->d = SIP_ROTATE(s->d, 21); s->d ^= s->a;
	s->c += s->b; s->b = SIP_ROTATE(s->b, 17); s->b ^= s->c; s->c = SIP_ROTATE(s->c, 32);
}

static __always_inline struct sip_state sip_start(const __u64 key[2])
{
	return (struct sip_state){
		.a = key[0] ^ 0x736f6d6570736575, .b = key[1] ^ 0x646f72616e646f6d,
		.c = key[0] ^ 0x6c7967656e657261, .d = key[1] ^ 0x7465646279746573,
	};
}

/* Adds the next eight bytes; the last word contains the remaining bytes, and in its top byte the total length modulo
 * 256. */
static __always_inline void sip_word(struct sip_state *s, __u64 word)
{
	s->d ^= word;
	sip_round(s);
	sip_round(s);
	s->a ^= word;
}

static __always_inline __u64 sip_end(struct sip_state *s)
{
	s->c ^= 0xff;
	sip_round(s);
	sip_round(s);
	sip_round(s);
	sip_round(s);
	return s->a ^ s->b ^ s->c ^ s->d;
}

/* Returns the hash of 8 to 15 bytes. */
static inline __u64 sip_hash(const __u64 key[2], __u64 first, __u64 last)
{
	struct sip_state s = sip_start(key);

	sip_word(&s, first);
	sip_word(&s, last);
	return sip_end(&s);
}

#endif
