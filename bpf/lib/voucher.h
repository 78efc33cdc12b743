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
 * protocol and flags, and for the receiver as the tables are now, under a key that only
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

/* Both hashes, as far as they have come. */
struct voucher_sum {
	__u64 a;
	__u64 b;
};

inline_fn void voucher_add(struct voucher_sum *sum, const struct voucher_key *key, int place, __u32 word)
{
	sum->a += word * key->words[place][0];
	sum->b += word * key->words[place][1];
}

/* TCP's flags are the only part that packets of a flow do not have in common: hashed by themselves, so that of what is
 * in common the voucher's own bits are all that must be kept. */
inline_fn __u64 voucher_with_flags(__u64 common, const struct voucher_key *key, __u8 tcp_flags)
{
	__u32 a = common + (tcp_flags * key->words[0][0] >> 32);
	__u32 b = (common >> 32) + (tcp_flags * key->words[0][1] >> 32);

	return a | (__u64)b << 32;
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
 * @id: of the endpoint that it is for, as the tables are now
 * @sealed: the sender's pod may still change the packet
 * @common: gets what the vouchers of its flow have in common, when sealed; or NULL
 *
 * Return: 0 when there is none for it.
 */
inline_fn __u64 voucher(struct __sk_buff *skb, __u32 id, bool sealed, __u64 *common)
{
	struct voucher_key *key = voucher_key();
	struct voucher_sum sum;
	__u8 tcp_flags;
	__u64 v;

	if (!key)
		return 0;
	sum = (struct voucher_sum){ .a = key->words[0][0], .b = key->words[0][1] };
	voucher_add(&sum, key, 1, tables_generation());
	if (!sealed) {
		voucher_add(&sum, key, 2, id);
		return voucher_of(&sum);
	}
	if (!voucher_add_headers(skb, &sum, key, id, &tcp_flags))
		return 0;
	v = voucher_of(&sum);
	if (common)
		*common = v;
	return voucher_with_flags(v, key, tcp_flags);
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
slow_fn int vouch(struct __sk_buff *skb, __u32 id, __u64 *common)
{
	voucher_attach(skb, voucher(skb, id, in_pod, common));
	return 0;
}

/**
 * vouch_again - as vouch, inside a pod, of a packet that goes the way of its flow's packets
 * @common: of its flow and this direction, zero when nobody has vouched yet
 */
inline_fn void vouch_again(struct __sk_buff *skb, __u64 *common, __u32 id, __u8 tcp_flags)
{
	struct voucher_key *key = voucher_key();
	__u64 v = *common;

	if (unlikely(!v))
		vouch(skb, id, common);
	else if (key)
		voucher_attach(skb, voucher_with_flags(v, key, tcp_flags));
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
	__u64 v;

	if (!rest)
		return false;
	v = voucher(skb, id, sealed, NULL);
	if (!v || rest != v >> 32 || skb->cb[CB_VOUCHER] != (__u32)v)
		return false;
	unvouch(skb);
	return true;
}
