/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * NetworkPolicy: whether a flow may be. Asked on a flow's first packet, and
 * again when something about one of its ends has changed; the answer for both
 * ends that are on this node is kept in the flow's entry.
 *
 * A set holds what all policies that select a pod allow in one direction. The
 * peer has up to two identities, as a pod and by the blocks that hold its
 * address; each set says which of them it asks for at all. Nothing found is
 * denied.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "fib.h"
#include "remote.h"
#include "source.h"

/* Return: this CPU's judgment, as the last packet left it; never NULL. */
inline_fn struct judgment *judgment(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_judgment_v1, &zero);
}

/**
 * judgment_begin - a question about a flow that nothing is known of yet
 * Return: never NULL, but for the verifier.
 */
inline_fn struct judgment *judgment_begin(void)
{
	struct judgment *j = judgment();

	if (j)
		__builtin_memset(j, 0, sizeof(*j));
	return j;
}

/**
 * port_rule - the rule of the list j->ports that allows j->port
 * Return: 0 when none does.
 */
global_fn int port_rule(void)
{
	struct judgment *j = judgment();
	__u32 *rule;

	if (!j)
		return 0;
	j->ports.proto = j->proto;
	for (int length = PORT_BITS; length >= 0; length--) {
		if (!(j->lengths >> length & 1))
			continue;
		j->ports.length = length;
		j->ports.port = j->port & ~(0xffff >> length);
		rule = grown_find(&mst_ports_v1_now, &j->ports);
		if (rule)
			return *rule;
	}
	return 0;
}

/* The rule of the set j->peer.set that allows @identity the port, 0 when none does. */
inline_fn __u32 peer_rule(struct judgment *j, __u64 identity)
{
	struct peer_rules *rules;

	j->peer.identity = identity;
	rules = grown_find(&mst_peers_v1_now, &j->peer);
	if (!rules)
		return 0;
	if (rules->rule)
		return rules->rule;
	j->ports.ports = rules->ports;
	j->lengths = rules->lengths;
	return port_rule();
}

inline_fn __u64 prefix_identity(struct judgment *j, const struct addr *a)
{
	__u64 *found;

	j->prefix.length = 8 * sizeof(*a);
	__builtin_memcpy(j->prefix.addr, a, sizeof(j->prefix.addr));
	found = bpf_map_lookup_elem(&mst_prefixes_v1, &j->prefix);
	return found ? *found : 0;
}

/**
 * set_rule - the rule of the set j->peer.set that allows a peer
 * @flags: enum set_flag
 * @peer: the other end, in @j
 *
 * Return: 0 when none does.
 */
slow_fn __u32 set_rule(struct judgment *j, __u32 flags, const struct addr *peer)
{
	struct identity *who;
	__u64 prefix;
	__u32 rule;

	if (flags & SET_ANYBODY) {
		rule = peer_rule(j, IDENTITY_ANYBODY);
		if (rule)
			return rule;
	}
	if (!(flags & (SET_ANY_POD | SET_PODS | SET_PREFIXES)))
		return 0;
	who = grown_find(&mst_identities_v1_now, peer);
	if (who && who->pod >= IDENTITY_FIRST) {
		rule = flags & SET_ANY_POD ? peer_rule(j, IDENTITY_ANY_POD) : 0;
		if (!rule && flags & SET_PODS)
			rule = peer_rule(j, who->pod);
		if (rule)
			return rule;
	}
	if (!(flags & SET_PREFIXES))
		return 0;
	prefix = who ? who->prefix : 0;
	if (!prefix)
		prefix = prefix_identity(j, peer);
	return prefix ? peer_rule(j, prefix) : 0;
}

inline_fn int denied(__u32 flags, int reason)
{
	if (flags & SET_UNKNOWN)
		return REASON_POLICY_UNKNOWN;
	return flags & SET_INCOMPLETE ? REASON_POLICY_INCOMPLETE : reason;
}

inline_fn struct endpoint_policy *policy_of(__u32 id)
{
	return bpf_map_lookup_elem(&mst_policies_v1, &id);
}

/**
 * policy_judge - whether a flow may be: by its opener's egress and its responder's ingress
 *
 * The question is in this CPU's judgment, which gets what decided. A pod always reaches itself,
 * and its node always reaches it.
 *
 * Return: enum drop_reason.
 */
global_fn int policy_judge(void)
{
	struct judgment *j = judgment();
	struct endpoint_policy *policy;

	if (!j)
		return REASON_POLICY_UNKNOWN;
	if (j->opener_id == j->responder_id)
		return REASON_NONE;
	policy = policy_of(j->opener_id);
	if (!policy)
		return REASON_POLICY_UNKNOWN;
	if (j->opener_id && policy->egress) {
		j->peer.set = j->set[VERDICT_EGRESS] = policy->egress;
		j->rule[VERDICT_EGRESS] = set_rule(j, policy->egress_flags, &j->responder);
		if (!j->rule[VERDICT_EGRESS])
			return denied(policy->egress_flags, REASON_POLICY_EGRESS);
	}
	if (!j->responder_id || j->from_node)
		return REASON_NONE;
	policy = policy_of(j->responder_id);
	if (!policy)
		return REASON_POLICY_UNKNOWN;
	if (policy->ingress) {
		j->peer.set = j->set[VERDICT_INGRESS] = policy->ingress;
		j->rule[VERDICT_INGRESS] = set_rule(j, policy->ingress_flags, &j->opener);
		if (!j->rule[VERDICT_INGRESS])
			return denied(policy->ingress_flags, REASON_POLICY_INGRESS);
	}
	return REASON_NONE;
}

/* Turn the question round: whether who is asked may have opened the flow. @port: of who is asked then, host order */
global_fn int judgment_turn(__u16 port)
{
	struct judgment *j = judgment();
	struct addr opener;
	__u32 id;

	if (!j)
		return 0;
	opener = j->opener;
	id = j->opener_id;
	j->opener = j->responder;
	j->responder = opener;
	j->opener_id = j->responder_id;
	j->responder_id = id;
	j->port = port;
	__builtin_memset(j->set, 0, sizeof(j->set));
	__builtin_memset(j->rule, 0, sizeof(j->rule));
	return 0;
}

inline_fn struct identity *identity_of(const struct addr *a)
{
	struct addr key = *a;

	return grown_find(&mst_identities_v1_now, &key);
}

/* Whether a pod takes packets by policy alone. */
inline_fn bool isolated(__u32 id)
{
	struct endpoint_policy *policy = policy_of(id);

	return policy && policy->ingress;
}

/* Whether an address is the node's own by its routing table, which is right also where nobody has told the policy's tables
 * yet. Of what has no route the answer is the same, but who sent that could get no answer. */
slow_fn bool local_address(struct __sk_buff *skb, const struct addr *a)
{
	struct bpf_fib_lookup fib = { .ifindex = skb->ifindex };

	fib_addrs(&fib, a, a);
	return bpf_fib_lookup(skb, &fib, sizeof(fib), 0) == BPF_FIB_LKUP_RET_NOT_FWDED;
}

/**
 * from_node - whether a packet to a pod is of the node itself, not merely from its address
 * @self: the endpoint it came to
 *
 * At the host's end the kernel knows where a packet came in. Inside a pod only the link address
 * of the host's own child tells; what has a NIC of its own must trust its network.
 */
slow_fn bool from_node(struct __sk_buff *skb, const struct addr *src, const struct endpoint *self)
{
	struct identity *who = identity_of(src);
	__u32 parent = self->parent;
	struct parent *link;
	struct ethhdr eth;

	if (from_wire || (who && who->pod != IDENTITY_NODE))
		return false;
	if (!in_pod && (skb->ingress_ifindex || who))
		return !skb->ingress_ifindex;
	if (!who) /* netkit's redirects between pods look as if the host had sent them */
		return !in_pod && !deliver_egress && isolated(skb->cb[CB_ENDPOINT]) && !link_local(src) && local_address(skb, src);
	if (!parent)
		return true;
	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return false;
	link = bpf_map_lookup_elem(&mst_parents_v1, &parent);
	if (link && !__builtin_memcmp(eth.h_source, link->mac, ETH_ALEN))
		return true;
	return host_child(&eth, parent);
}

/**
 * link_upkeep - whether a packet without a flow is the link's own business
 *
 * ARP, IGMP, and of ICMPv6 listener and neighbour discovery.
 */
inline_fn bool link_upkeep(const struct pkt *p)
{
	if (p->proto == IPPROTO_ICMPV6)
		return p->icmp_type >= 130 && p->icmp_type <= 143;
	return !p->l4_off || p->proto == IPPROTO_IGMP; /* ARP has no network header */
}

/**
 * judge_group - multicast and broadcast have no flow: each packet of an isolated pod is judged
 * @self: the endpoint that sends or gets it
 * @sends: it is the sender
 *
 * Return: enum drop_reason.
 */
slow_fn int judge_group(struct __sk_buff *skb, const struct pkt *p, struct endpoint *self, __u32 id, bool sends)
{
	struct judgment *j;

	if (link_upkeep(p))
		return REASON_NONE;
	j = judgment_begin();
	if (!j)
		return REASON_POLICY_UNKNOWN;
	j->opener = p->t.src;
	j->responder = p->t.dst;
	j->proto = p->proto;
	j->port = bpf_ntohs(p->t.dport);
	if (sends)
		j->opener_id = id;
	else
		j->responder_id = id;
	j->from_node = !sends && from_node(skb, &p->t.src, self);
	return policy_judge();
}
