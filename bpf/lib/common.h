/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What every program starts from: kernel headers, helpers, small tools on addresses. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../flow.h"
#include "../reasons.h"
#include "../config.h"
#include "../maps.h"
#include "btf.h"

#define inline_fn static __always_inline
/* Off the established path: keeps the hot code dense. A header's may be of no use to one of the objects. */
#define slow_fn static __noinline __attribute__((unused))
/* Not static: the verifier checks it once, for any arguments, not again for each caller's state.
 * Pointers may be NULL as far as it knows. */
#define global_fn __noinline

/* Of IPv4's frag_off. */
#define IP_DONT_FRAGMENT 0x4000
#define IP_MORE_FRAGMENTS 0x2000
#define IP_OFFSET_MASK 0x1fff

/* Where most packets pass: what the compiler lays out in one piece, a line of code after the other. */
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* A program that lets a packet go on leaves the word to those attached after it. */
#define NEXT TC_ACT_UNSPEC

/* A tc verdict, not one of the programs' own numbers, which are below. */
#define is_verdict(x) ((x) >= NEXT)

/* Keeps the compiler from reasoning about X, so that the verifier sees each bound. */
#define opaque(x) asm volatile("" : "+r"(x))


/* The compiler likes to copy these two by 32-bit moves, which the verifier refuses. */
inline_fn void *packet(const struct __sk_buff *skb)
{
	void *p;

	asm volatile("%0 = *(u32 *)(%1 + %2)"
		     : "=r"(p)
		     : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, data)));
	return p;
}

inline_fn void *packet_end(const struct __sk_buff *skb)
{
	void *p;

	asm volatile("%0 = *(u32 *)(%1 + %2)"
		     : "=r"(p)
		     : "r"(skb), "i"(__builtin_offsetof(struct __sk_buff, data_end)));
	return p;
}

/*
 * Programs write headers where they lie: the kernel makes those of a packet that others may hold
 * its own before a program that writes runs at all. TCP holds each packet it sends until its
 * answer, so inside pods, where few packets are written to at all, that would cost each of them a
 * hundred instructions: there headers are written by helper alone.
 */

/* Return: whether both link addresses of the packet are now these (12 bytes at a multiple of 4), the
 * destination first. */
inline_fn bool link_write(const struct __sk_buff *skb, const __u8 *macs)
{
	struct ethhdr *eth = packet(skb);

	if (unlikely((void *)(eth + 1) > packet_end(skb)))
		return false;
	/* By words: the compiler, which must not rely on any alignment, would go byte by byte. */
	for (int i = 0; i < 3; i++)
		((__u32 *)eth)[i] = ((const __u32 *)macs)[i];
	return true;
}

/* Return: seconds of CLOCK_MONOTONIC, of 2^30 ns each (1.07 s): a division for every packet
 * would cost more than the lifetimes of flows are worth. */
inline_fn __u32 now_seconds(void)
{
	return bpf_ktime_get_coarse_ns() >> SECOND_SHIFT;
}

/* Return: ticks of the kernel's timer, CONFIG_HZ a second: one load, where a clock takes fifty instructions. */
inline_fn __u32 now_ticks(void)
{
	return bpf_jiffies64();
}

/* By words, as link_write: both at a multiple of 4, or in a packet. */
inline_fn bool mac_equal(const __u8 *a, const __u8 *b)
{
	return *(__u32 *)a == *(__u32 *)b && *(__u16 *)(a + 4) == *(__u16 *)(b + 4);
}

/* Whether a packet is from that link address. */
inline_fn bool from_mac(struct __sk_buff *skb, const __u8 *mac)
{
	struct ethhdr *eth = packet(skb);

	return (void *)(eth + 1) <= packet_end(skb) && mac_equal(eth->h_source, mac);
}

inline_fn void addr_from_ipv4(struct addr *a, __be32 ip)
{
	a->quads[0] = 0;
	/* In one piece (the programs are built little-endian): read as a quad right after it was
	 * written as words, it would have to wait until both are in the cache. */
	a->quads[1] = (__u64)ip << 32 | bpf_htonl(0xffff);
}

inline_fn bool addr_is_ipv4(const struct addr *a)
{
	return a->quads[0] == 0 && a->words[2] == bpf_htonl(0xffff);
}

/* Whether the network that was found for an address is of its family. */
inline_fn bool net_holds(const __u8 *found, const struct addr *a)
{
	return found && (*found != NET_IPV6_ONLY || !addr_is_ipv4(a));
}

inline_fn bool addr_is_zero(const struct addr *a)
{
	return !(a->quads[0] | a->quads[1]);
}

inline_fn bool addr_equal(const struct addr *a, const struct addr *b)
{
	return a->quads[0] == b->quads[0] && a->quads[1] == b->quads[1];
}

inline_fn bool tuple_equal(const struct tuple *a, const struct tuple *b)
{
	return addr_equal(&a->src, &b->src) && addr_equal(&a->dst, &b->dst) &&
	       *(const __u32 *)&a->sport == *(const __u32 *)&b->sport; /* and the other port */
}

inline_fn void tuple_reverse(struct tuple *to, const struct tuple *from)
{
	to->src = from->dst;
	to->dst = from->src;
	to->sport = from->dport;
	to->dport = from->sport;
}

/* Return: the value of @key in a table that grows, @now being what holds it; NULL when there is none. */
inline_fn void *grown_find(void *now, const void *key)
{
	static const __u32 only = 0; /* not on the stack, where chains of calls have little room */
	void *table = bpf_map_lookup_elem(now, &only);

	return table ? bpf_map_lookup_elem(table, key) : NULL;
}

/* Return: the slot of endpoint @id; its generation is 0 when the slot is free. */
inline_fn struct endpoint *endpoint_slot(__u32 id)
{
	return bpf_map_lookup_elem(&mst_endpoints_v1, &id);
}

/* Return: id of the node's own endpoint that has this address, 0 when none has. */
inline_fn __u32 endpoint_of(const struct addr *a)
{
	struct addr key = *a; /* on the stack: 6.1 takes no key from a global function's argument */
	__u32 *id = bpf_map_lookup_elem(&mst_endpoint_addrs_v1, &key);

	return id ? *id : 0;
}

/* The bit of an address in mst_endpoint_bits: 16 bits of a hash. */
inline_fn __u32 endpoint_bit(const struct addr *a)
{
	return ((a->words[0] ^ a->words[1] ^ a->words[2] ^ a->words[3]) * 0x9e3779b1u) >> 16;
}

inline_fn struct facts *facts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_facts_v1, &zero);
}

/* Return: the number that the engine moves after it rewrote flows. */
inline_fn __u32 tables_generation(void)
{
	__u32 zero = 0;
	struct meta *meta = bpf_map_lookup_elem(&mst_meta_v1, &zero);

	return meta ? meta->next_generation : 0;
}
