/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * ICMP errors belong to the flow of the packet they quote (RFC 792, RFC 4443
 * 3). Where that flow is translated, so are they, the quoted packet included
 * (RFC 5508 4.2).
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "nat.h"
#include "parse.h"

#define ICMP_HEADER 8

/* The packet that an error quotes. */
struct quote {
	struct tuple t; /* as it was sent: the error goes to its source */
	__u32 ip_off;   /* bytes from the link header */
	__u32 l4_off;
	__u8 proto;
	bool keep_outer; /* the error's own addresses stay: the node's stack gets it, which checks where they come from */
	bool worn_outer; /* it comes from where the flow does: a tunnel takes nothing from a router elsewhere */
	__u8 pad[5];
};

inline_fn bool quotes_icmp(const struct quote *q)
{
	return q->proto == IPPROTO_ICMP || q->proto == IPPROTO_ICMPV6;
}

inline_fn int quote_ipv4(struct __sk_buff *skb, struct quote *q)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, q->ip_off, &ip, sizeof(ip)))
		return REASON_TRUNCATED;
	if (ip.version != 4 || ip.ihl < 5)
		return REASON_BAD_HEADER;
	if (ip.frag_off & bpf_htons(IP_OFFSET_MASK))
		return REASON_ICMP_ERROR_FLOW;
	addr_from_ipv4(&q->t.src, ip.saddr);
	addr_from_ipv4(&q->t.dst, ip.daddr);
	q->proto = ip.protocol;
	q->l4_off = q->ip_off + ip.ihl * 4;
	return REASON_NONE;
}

/* Past what lies before the quoted transport header, as skip_ext_headers() goes past it in a packet. */
inline_fn int quote_ext_headers(struct __sk_buff *skb, struct quote *q)
{
	struct ext_header h;

	for (int i = 0; i < MAX_EXT_HEADERS; i++) {
		__u8 type = q->proto;

		if (type != IPPROTO_HOPOPTS && type != IPPROTO_ROUTING && type != IPPROTO_DSTOPTS &&
		    type != IPPROTO_FRAGMENT && type != IPPROTO_AH)
			break;
		if (bpf_skb_load_bytes(skb, q->l4_off, &h, sizeof(h)))
			return REASON_TRUNCATED;
		if (type == IPPROTO_FRAGMENT && h.frag_off & bpf_htons(IP6_OFFSET_MASK))
			return REASON_ICMP_ERROR_FLOW;
		q->proto = h.next;
		if (type == IPPROTO_FRAGMENT)
			q->l4_off += sizeof(h);
		else if (type == IPPROTO_AH)
			q->l4_off += (h.length + 2) * 4;
		else
			q->l4_off += (h.length + 1) * 8;
	}
	return REASON_NONE; /* with one more, of no flow */
}

inline_fn int quote_ipv6(struct __sk_buff *skb, struct quote *q)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, q->ip_off, &ip, sizeof(ip)))
		return REASON_TRUNCATED;
	if (ip.version != 6)
		return REASON_BAD_HEADER;
	__builtin_memcpy(&q->t.src, &ip.saddr, 16);
	__builtin_memcpy(&q->t.dst, &ip.daddr, 16);
	q->proto = ip.nexthdr;
	q->l4_off = q->ip_off + sizeof(ip);
	return quote_ext_headers(skb, q);
}

/**
 * quote_parse - read the packet that an ICMP error quotes
 * @q: zeroed
 *
 * Return: enum drop_reason.
 */
global_fn int quote_parse(struct __sk_buff *skb, struct pkt *p, struct quote *q)
{
	__be16 words[4];
	int reason;

	if (!p || !q)
		return REASON_TRUNCATED;
	q->ip_off = p->l4_off + ICMP_HEADER;
	reason = p->ipv6 ? quote_ipv6(skb, q) : quote_ipv4(skb, q);
	if (reason)
		return reason;
	if (q->proto != IPPROTO_TCP && q->proto != IPPROTO_UDP && q->proto != IPPROTO_SCTP && !quotes_icmp(q))
		return REASON_NONE; /* it has no ports, and parse() gives it none */
	if (bpf_skb_load_bytes(skb, q->l4_off, words, sizeof(words)))
		return REASON_TRUNCATED;
	if (!quotes_icmp(q)) {
		q->t.sport = words[0];
		q->t.dport = words[1];
	} else if (is_echo(q->proto, ((__u8 *)words)[0])) {
		q->t.sport = words[2];
		q->t.dport = words[2];
	} else {
		q->t.dport = bpf_htons(((__u8 *)words)[0]);
	}
	return REASON_NONE;
}

/* The quoted transport checksum, where the quote is long enough to have it: brought up to
 * date, and the change of its bytes carried over to the error's own checksum. */
inline_fn int quote_checksum(struct __sk_buff *skb, const struct quote *q, __u32 csum, __s64 addrs, __be32 old,
			     __be32 new)
{
	__u32 off = q->l4_off + (quotes_icmp(q) ? 2 : q->proto == IPPROTO_UDP ? 6 : 16);
	__u64 zero_is_none = q->proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__be16 before, after;

	if (bpf_skb_load_bytes(skb, off, &before, sizeof(before)))
		return 0;
	if (bpf_l4_csum_replace(skb, off, 0, addrs, zero_is_none) ||
	    bpf_l4_csum_replace(skb, off, old, new, zero_is_none | sizeof(new)) ||
	    bpf_skb_load_bytes(skb, off, &after, sizeof(after)))
		return -1;
	return bpf_l4_csum_replace(skb, csum, before, after, sizeof(after));
}

/* The quoted addresses. IPv4's own header checksum makes their change neutral to the error's. */
inline_fn int quote_addrs(struct __sk_buff *skb, struct pkt *p, const struct quote *q, const struct tuple *to,
			  __u32 csum, __s64 *diff)
{
	if (p->ipv6) {
		*diff = bpf_csum_diff((__be32 *)&q->t.src, 32, (__be32 *)&to->src, 32, 0);
		if (bpf_skb_store_bytes(skb, q->ip_off + 8, &to->src, 32, 0))
			return -1;
		return bpf_l4_csum_replace(skb, csum, 0, *diff, 0);
	} else {
		__be32 old[2] = { q->t.src.words[3], q->t.dst.words[3] };
		__be32 new[2] = { to->src.words[3], to->dst.words[3] };

		*diff = bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
		if (bpf_skb_store_bytes(skb, q->ip_off + 12, new, sizeof(new), 0))
			return -1;
		return bpf_l3_csum_replace(skb, q->ip_off + 10, 0, *diff, 0);
	}
}

/* The error's own addresses: from the flow's other end, unless a router in between sent it, and may be named.
 * Return: whether that was possible.
 */
inline_fn bool error_addrs(struct __sk_buff *skb, struct pkt *p, const struct quote *q, const struct tuple *to,
			  __u32 csum)
{
	struct tuple outer = p->t;
	__u32 diff;

	if (q->worn_outer || addr_equal(&outer.src, &q->t.dst))
		outer.src = to->dst;
	outer.dst = to->src;
	diff = words_diff(p->t.src.words, outer.src.words, 8);
	if (!p->ipv6) /* one by one: the stack has no room for both side by side */
		return !bpf_l3_csum_replace(skb, ETH_HLEN + 10, 0, diff, 0) &&
		       !bpf_skb_store_bytes(skb, ETH_HLEN + 12, &outer.src.words[3], 4, 0) &&
		       !bpf_skb_store_bytes(skb, ETH_HLEN + 16, &outer.dst.words[3], 4, 0);
	if (bpf_skb_store_bytes(skb, ETH_HLEN + 8, &outer.src, 32, 0) ||
	    bpf_l4_csum_replace(skb, csum, 0, diff, BPF_F_PSEUDO_HDR))
		return false;
	bpf_csum_update(skb, diff); /* as translate() does */
	return true;
}

/* Whether a pod's ICMP error is about a flow of others. @f: as error_flow found it; @id: of the endpoint that sends it */
inline_fn bool error_of_others(const struct flow *f, __u32 id)
{
	return (f->reply ? f->e->responder.endpoint : f->e->opener.endpoint) != id;
}

/**
 * translate_error - make an ICMP error speak of the tuple that its receiver knows
 * @to: what the quoted tuple becomes
 *
 * Return: enum drop_reason.
 */
global_fn int translate_error(struct __sk_buff *skb, struct pkt *p, struct quote *q, const struct tuple *to)
{
	__be32 old, new;
	__u32 csum, at;
	__s64 diff;

	if (!p || !q || !to)
		return REASON_ICMP_ERROR_NAT;
	if (!p->ipv6 && p->icmp_type == ICMP_REDIRECT) /* it speaks of another link's way to another address */
		return REASON_ICMP_ERROR_NAT;
	csum = p->l4_off + 2;
	if (q->proto != IPPROTO_TCP && q->proto != IPPROTO_UDP && q->proto != IPPROTO_SCTP && !quotes_icmp(q))
		return REASON_ICMP_ERROR_NAT;
	at = q->l4_off;
	old = *(__be32 *)&q->t.sport;
	new = *(__be32 *)&to->sport;
	if (quotes_icmp(q)) { /* the identifier, and the number behind it, which stays */
		at += 4;
		if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)))
			return REASON_ICMP_ERROR_NAT;
		new = (old & bpf_htonl(0xffff)) | (new & bpf_htonl(0xffff0000));
	}
	if (quote_addrs(skb, p, q, to, csum, &diff))
		return REASON_ICMP_ERROR_NAT;
	if (q->proto == IPPROTO_ICMP) /* whose checksum does not cover them */
		diff = 0;
	/* SCTP's stays: it is the whole packet's, and the tag says whose the error is (RFC 9260 10). */
	if (q->proto != IPPROTO_SCTP && quote_checksum(skb, q, csum, diff, old, new))
		return REASON_ICMP_ERROR_NAT;
	if (bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0) || bpf_l4_csum_replace(skb, csum, old, new, sizeof(new)))
		return REASON_ICMP_ERROR_NAT;
	return q->keep_outer || error_addrs(skb, p, q, to, csum) ? REASON_NONE : REASON_ICMP_ERROR_NAT;
}

/**
 * error_flow - find the flow that an ICMP error is about
 * @f: now must be set; its direction becomes the error's
 * @q: zeroed; filled with the quoted packet
 *
 * Return: enum drop_reason.
 */
inline_fn int error_flow(struct __sk_buff *skb, struct pkt *p, struct flow *f, struct quote *q)
{
	int reason = quote_parse(skb, p, q);

	if (reason)
		return reason;
	if (!addr_equal(&p->t.dst, &q->t.src)) /* it would go to somebody who has not sent that */
		return REASON_ICMP_ERROR_FLOW;
	f->src_is_hi = ct_key_of(&f->key, &q->t, q->proto, CT_SCOPE_FLOW);
	ct_find_by_key(f);
	if (!f->e)
		return REASON_ICMP_ERROR_FLOW;
	f->reply = !f->reply;
	return REASON_NONE;
}
