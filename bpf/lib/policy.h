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

/* An end is as it was when the flow was judged. */
inline_fn bool end_current(const struct ct_end *end)
{
	struct endpoint *ep;

	if (!end->endpoint)
		return in_pod || !end->generation || remote_of(end->generation);
	ep = endpoint_slot(end->endpoint);
	return ep && ep->generation == end->generation;
}

inline_fn bool ends_current(const struct ct_entry *e)
{
	return end_current(&e->opener) && end_current(&e->responder);
}

/**
 * error_current - whether what was judged of both ends of a flow holds, as either half of it has that
 * @at: where @e lies
 *
 * Each half is judged anew by the packets that it sees: a packet by one, an ICMP error about it finds the other.
 */
global_fn int error_current(const struct ct_key *at, const struct ct_entry *e)
{
	struct tuple mine = {};
	struct ct_entry *half;
	struct ct_key key;

	if (!at || !e)
		return 0;
	if (ends_current(e))
		return 1;
	half = e->role == CT_DIRECT ? NULL : ct_half(at, e, now_seconds(), &key, &mine);
	return half && half->opener.endpoint == e->opener.endpoint &&
	       half->responder.endpoint == e->responder.endpoint && ends_current(half);
}

/* The generation is read before policy is asked: what changes meanwhile is seen by the next packet. */
inline_fn void end_set_id(struct ct_end *end, __u32 id)
{
	struct endpoint *ep = id ? endpoint_slot(id) : NULL;

	end->endpoint = 0;
	end->generation = 0;
	if (!ep || !ep->generation)
		return;
	end->generation = ep->generation;
	end->endpoint = id;
}

inline_fn void end_set(struct ct_end *end, const struct addr *a)
{
	end_set_id(end, endpoint_of(a));
	if (!end->endpoint && !in_pod) /* whose packets find their way by themselves */
		end->generation = remote_find(a);
}

/* The same of a flow's opener: it may be another node itself, with nobody's network around its address. */
inline_fn void end_set_opener(struct ct_end *end, const struct addr *a)
{
	struct addr key = *a;

	end_set(end, a);
	if (!end->endpoint && !end->generation && !in_pod)
		end->generation = node_with(&key);
}

/* An end that was outside still is, if nobody has its address now. */
global_fn int end_stays_outside(struct ct_end *end, __u32 endpoint, __u32 generation)
{
	if (end && !endpoint && generation == REMOTE_OUTSIDE && !end->endpoint && !end->generation && remote_of(REMOTE_OUTSIDE))
		end->generation = REMOTE_OUTSIDE;
	return 0;
}

/**
 * end_of_hook - an end that no table knows, of a packet at an endpoint's hook
 * @id: the endpoint
 *
 * It is the endpoint that is asked about. But only a link-local address, which is in no table, is the endpoint's own:
 * what is for many, as a broadcast to a network is, would lead its flow to the last of them.
 *
 * Return: whom policy is to be asked about.
 */
inline_fn __u32 end_of_hook(struct ct_end *end, const struct addr *a, __u32 id)
{
	if (!id || end->endpoint)
		return end->endpoint;
	if (link_local(a))
		end_set_id(end, id);
	return id;
}

/**
 * judge_again - an end of the flow changed: find both anew, and ask policy about them
 * @at: where its entry lies
 * @id: the endpoint that this program serves; 0: none
 * @opener: it is the flow's opener
 *
 * A flow that is cut keeps its entry, so that its other end cannot open it again from there: for as long as anybody sends,
 * where that may be sent again (TCP, SCTP); else for a while, for the other end may have something to say of its own.
 *
 * Return: enum drop_reason.
 */
global_fn int judge_again(struct ct_entry *e, const struct ct_key *at, __u32 id, bool opener)
{
	struct judgment *j = judgment_begin();
	const struct addr *opened, *answered;
	struct ct_end opener_now, responder_now;
	__be16 port;
	int reason;
	bool hi;

	if (!e || !at || !j)
		return REASON_NONE;
	hi = e->flags & CT_ORIGIN_IS_HI;
	opened = hi ? &at->hi : &at->lo;
	answered = hi ? &at->lo : &at->hi;
	port = hi ? at->lo_port : at->hi_port;
	/* The opener as the client's own tuple names it, the responder as the backend's. */
	j->opener = e->role == CT_POST_NAT ? e->other.src : *opened;
	j->responder = e->role == CT_PRE_NAT ? e->other.dst : *answered;
	j->port = bpf_ntohs(e->role == CT_PRE_NAT ? e->other.dport : port);
	j->proto = at->proto;
	j->from_node = !!(e->flags & CT_FROM_NODE);
	end_set_opener(&opener_now, &j->opener);
	end_set(&responder_now, &j->responder);
	if (!in_pod)
		end_stays_outside(&responder_now, e->responder.endpoint, e->responder.generation);
	j->opener_id = end_of_hook(&opener_now, &j->opener, opener ? id : 0);
	j->responder_id = end_of_hook(&responder_now, &j->responder, opener ? 0 : id);
	reason = policy_judge();
	if (!reason && e->flags & CT_EITHER) {
		judgment_turn(bpf_ntohs(hi ? at->hi_port : at->lo_port));
		reason = policy_judge();
	}
	if (!reason) { /* not before: to another CPU's packet the flow would be judged, and allowed */
		e->opener = opener_now;
		e->responder = responder_now;
		return REASON_NONE;
	}
	if (e->opener.endpoint != CT_END_CUT || at->proto == IPPROTO_TCP || at->proto == IPPROTO_SCTP) {
		near_elsewhere(at, e, now_seconds() + CT_CUT_LIFETIME);
		e->expires = now_seconds() + CT_CUT_LIFETIME;
	}
	e->opener.endpoint = CT_END_CUT;
	e->responder.endpoint = CT_END_CUT;
	return reason;
}

/**
 * cut_alone - what the backend sees of a flow that policy cut becomes a cut flow of its own: the client's half ends
 * @e: the client's half
 */
global_fn int cut_alone(const struct ct_key *at, const struct ct_entry *e)
{
	__u32 now = now_seconds();
	struct tuple mine = {};
	struct ct_entry *half;
	struct ct_key key;

	if (!at || !e)
		return 0;
	half = ct_half(at, e, now, &key, &mine);
	if (!half)
		return 0;
	half->opener.endpoint = CT_END_CUT;
	half->responder.endpoint = CT_END_CUT;
	half->role = CT_DIRECT;
	__builtin_memset(&half->other, 0, sizeof(half->other));
	near_elsewhere(&key, half, now + CT_CUT_LIFETIME);
	half->expires = now + CT_CUT_LIFETIME;
	return 0;
}

/**
 * denied_anew - whether policy denies an opener that begins its flow anew
 * @at: where its entry @e lies
 * @id: the endpoint that this program serves
 * @sends: it is the opener
 *
 * Of an answered flow policy is asked first what it has not been asked since it changed: if it denies the new flow, it
 * has cut the old one, and that one's entry stays. But a client's half may begin anew with another backend.
 *
 * Return: enum drop_reason.
 */
global_fn int denied_anew(struct ct_entry *e, const struct ct_key *at, __u32 id, bool sends)
{
	int reason;

	if (!e || !at || (e->role != CT_PRE_NAT && !e->seen_reply) || e->flags & CT_EDGE || ends_current(e))
		return REASON_NONE;
	reason = judge_again(e, at, id, sends);
	if (e->role != CT_PRE_NAT)
		return reason;
	if (reason)
		cut_alone(at, e);
	return REASON_NONE;
}

/**
 * begin_anew - end the flow that a packet begins anew, unless policy denies the new one
 * Return: enum drop_reason.
 */
slow_fn int begin_anew(struct flow *f, __u32 id, bool sends)
{
	int reason = f->reply ? REASON_NONE : denied_anew(f->e, &f->key, id, sends);

	if (!reason)
		ct_forget(f);
	return reason;
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
