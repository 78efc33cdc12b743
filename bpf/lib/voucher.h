/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Where the receiver's hook comes behind the sender's (inside pods, netkit), the
 * sender's program has asked everything about both ends by the time it sends a
 * packet on. It says so by a voucher in the packet's control block, and the
 * receiver's entry program lets the packet pass without asking again.
 *
 * The control block is the kernel's; nobody in a pod writes to it. But inside a
 * pod that has CAP_NET_ADMIN a packet may be changed behind the sender's program
 * (by a tc action), or held back. So there the voucher is for the packet's tuple,
 * protocol and flags, and for the receiver as it is now, under a key that only
 * programs know: two universal hashes, so that nobody hits a valid one but with
 * 2^-64, whatever packets it tries. What is not of the usual shape gets none, and
 * is judged by the receiver's program.
 */
#pragma once

#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "common.h"

#define VOUCHER_IPV6 (1u << 31) /* among id, protocol and flags */
_Static_assert(VOUCHER_WORDS == 4 + 2 * 4, "what is vouched for, two addresses at the end");

inline_fn void voucher_add(struct voucher_sum *sum, const struct voucher_key *key, int place, __u32 word)
{
	sum->a += word * key->words[place][0];
	sum->b += word * key->words[place][1];
}

/* TCP's flags are the only part that packets of a flow do not have in common. */
inline_fn void voucher_add_flags(struct voucher_sum *sum, const struct voucher_key *key, __u8 tcp_flags)
{
	voucher_add(sum, key, 2, (__u32)tcp_flags << 8);
}

/**
 * voucher_add_headers - add addresses, ports and protocol, with the receiver's @id
 * @tcp_flags: gets TCP's, which are not added
 *
 * Return: whether the packet is of the usual shape.
 */
inline_fn bool voucher_add_headers(struct __sk_buff *skb, struct voucher_sum *sum, const struct voucher_key *key,
				   __u32 id, __u8 *tcp_flags)
{
	struct ethhdr *eth = packet(skb);
	struct iphdr *ip = (void *)(eth + 1);
	struct ipv6hdr *ip6 = (void *)(eth + 1);
	void *end = packet_end(skb), *l4;
	__u32 what = id << 16;

	*tcp_flags = 0;
	if (skb->vlan_present || (void *)(ip + 1) + sizeof(struct udphdr) > end)
		return false;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		if (*(__u8 *)ip != 0x45 || ip->frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_OFFSET_MASK))
			return false;
		voucher_add(sum, key, 4, ip->saddr);
		voucher_add(sum, key, 5, ip->daddr);
		what |= ip->protocol;
		l4 = ip + 1;
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		if ((void *)(ip6 + 1) + sizeof(struct udphdr) > end)
			return false;
		for (int i = 0; i < 8; i++) /* both addresses, which lie side by side */
			voucher_add(sum, key, 4 + i, ((__u32 *)&ip6->saddr)[i]);
		what |= ip6->nexthdr | VOUCHER_IPV6;
		l4 = ip6 + 1;
	} else {
		return false;
	}
	if ((__u8)what == IPPROTO_TCP) {
		if (l4 + sizeof(struct tcphdr) > end)
			return false;
		*tcp_flags = ((const __u8 *)l4)[13];
	} else if ((__u8)what != IPPROTO_UDP) {
		return false;
	}
	voucher_add(sum, key, 2, what);
	voucher_add(sum, key, 3, *(__u32 *)l4); /* both ports */
	return true;
}

inline_fn struct voucher_key *voucher_key(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_voucher_v1, &zero);
}

inline_fn __u64 voucher_of(const struct voucher_sum *sum)
{
	return sum->a >> 32 | (sum->b & ~0xffffffffULL);
}

/**
 * voucher - what vouches for a packet as it is now
 * @id: of the endpoint that it is for
 * @generation: of that endpoint
 * @sealed: the sender's pod may still change the packet
 * @common: gets what the vouchers of its flow have in common, when sealed; or NULL
 *
 * Return: 0 when there is none for it.
 */
inline_fn __u64 voucher(struct __sk_buff *skb, __u32 id, __u32 generation, bool sealed, struct voucher_sum *common)
{
	struct voucher_key *key = voucher_key();
	struct voucher_sum sum;
	__u8 tcp_flags;

	if (!key)
		return 0;
	sum = (struct voucher_sum){ .a = key->words[0][0], .b = key->words[0][1] };
	voucher_add(&sum, key, 1, generation);
	if (!sealed) {
		voucher_add(&sum, key, 2, id);
		return voucher_of(&sum);
	}
	if (!voucher_add_headers(skb, &sum, key, id, &tcp_flags))
		return 0;
	if (common)
		*common = sum;
	voucher_add_flags(&sum, key, tcp_flags);
	return voucher_of(&sum);
}

inline_fn void voucher_attach(struct __sk_buff *skb, __u64 v)
{
	skb->cb[CB_VOUCHER] = v;
	skb->cb[CB_VOUCHER_REST] = v >> 32;
}

/**
 * vouch - the sender's program has nothing more to ask about a packet for the endpoint @id
 * @common: gets what the vouchers of its flow have in common, when sealed; or NULL
 */
slow_fn int vouch(struct __sk_buff *skb, __u32 id, __u32 generation, struct voucher_sum *common)
{
	voucher_attach(skb, voucher(skb, id, generation, in_pod, common));
	return 0;
}

/**
 * vouch_again - as vouch, inside a pod, of a packet that goes the way of its flow's packets
 * @common: of its flow and this direction, zero when nobody has vouched yet
 */
inline_fn void vouch_again(struct __sk_buff *skb, struct voucher_sum *common, __u32 id, __u32 generation, __u8 tcp_flags)
{
	struct voucher_sum sum = *common;
	struct voucher_key *key;

	if (!sum.a) {
		vouch(skb, id, generation, common);
		return;
	}
	key = voucher_key();
	if (!key)
		return;
	voucher_add_flags(&sum, key, tcp_flags);
	voucher_attach(skb, voucher_of(&sum));
}

/* The receiver's program has something to do after all. */
inline_fn void unvouch(struct __sk_buff *skb)
{
	skb->cb[CB_VOUCHER_REST] = 0;
}

/* Whether a packet comes to endpoint @id with a voucher, which is then spent. */
inline_fn bool vouched(struct __sk_buff *skb, __u32 id, bool sealed)
{
	__u32 rest = skb->cb[CB_VOUCHER_REST];
	struct endpoint *self;
	__u64 v;

	if (!rest)
		return false;
	self = endpoint_slot(id);
	if (!self || !self->generation)
		return false;
	v = voucher(skb, id, self->generation, sealed, NULL);
	if (!v || rest != v >> 32 || skb->cb[CB_VOUCHER] != (__u32)v)
		return false;
	unvouch(skb);
	return true;
}
