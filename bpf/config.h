/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Load-time constants: the verifier sees their values and removes dead branches. */
#pragma once

#include "types.h"

/* 1: the programs sit inside the pod, so the pod's egress is the hook's egress. */
const volatile __u8 in_pod = 0;

/* 1: a packet for another pod goes out of that pod's host end, whose program then has its say.
 * netkit's programs run as the pod transmits, where redirect_peer is not to be had. */
const volatile __u8 deliver_egress = 0;

/* The receiver's hook comes behind the sender's. */
#define hook_follows (in_pod || deliver_egress)

/* 1: to_pod runs at the node's NIC, for a packet of another node's pod, and delivers it. */
const volatile __u8 from_wire = 0;

/* 1: to_pod runs at the edge, for a client's packet that has just been translated there, and delivers it. */
const volatile __u8 from_edge = 0;

/* 1: from_outside runs at the tunnel's device, for answers to flows that wear its address. */
const volatile __u8 from_tunnel = 0;

/* 1: from_outside runs at the door, for what the node's own sockets send to Services by packet. */
const volatile __u8 from_door = 0;

/* Marks an answer of ours that passes a hook on its way back to the pod. The loader draws it by
 * lot, so that nobody can pass another packet off as one. */
const volatile __u32 answer_key = 0x6d737401;

/* 1: the kernel has bpf_set_retval (5.18), so a refused connect() gets its own errno. */
const volatile __u8 has_set_retval = 0;

/* 1: nobody's packet: `mustang why` asks what would become of one. The tables that it would write
 * are copies, and what it would tell a pod or a reader is not held back by any limit. */
const volatile __u8 dry_run = 0;

/* Cookie of the node's own namespace: its sockets may send anything. */
const volatile __u64 node_netns = 0;

/* Lifetimes of flow entries, seconds since the last packet. */
struct ct_timeouts {
	__u32 tcp_half_open;
	__u32 tcp_established;
	__u32 tcp_closing; /* after a FIN of either end */
	__u32 tcp_reset;
	__u32 udp_half_open;
	__u32 udp_established;
	__u32 other;
};
const volatile struct ct_timeouts timeouts = {
	.tcp_half_open = 60,
	.tcp_established = 86400,
	.tcp_closing = 120,
	.tcp_reset = 10,
	.udp_half_open = 30,
	.udp_established = 180,
	.other = 30,
};

#define MST_LAYOUT 3
#define SECOND_SHIFT 30 /* the programs count seconds of 2^30 ns */
#define NAT_PORT_TRIES 16
#define NAT_PORT_FIRST 32768
#define NAT_PORT_COUNT 28232
#define WORN_MORE_FIRST 10000 /* ports that masqueraded flows wear when those of the edge are taken, each only */
#define WORN_MORE_COUNT 20000 /* where nobody listens: above most that do, below node ports and the host's own */
#define CT_REFRESH 4 /* seconds: an entry is written to at most this often */
#define CT_CUT_LIFETIME 180 /* seconds since the last packet, more than a retransmission (120) or a probe (75) waits: a flow that policy cut is not opened again from its other end */
#define CT_NEAR_CLOSED 2 /* seconds begun: then the room of a closed flow may be another's */
#define PAIR_LIFETIME 16 /* ticks: 16 to 160 ms */
#define FAST_LIFETIME 256 /* ticks, 0.26 to 2.6 s: how long a flow's entry may go unseen */
#define FAST_SLOTS 1024
#define FRAG_LIFETIME 15
#define FRAG_GATHERED_LIFETIME 1 /* seconds, at least, since the last of a datagram's fragments that went to be put together */
#define EVENTS_PER_ENDPOINT 1000 /* in a second, on each CPU */
#define EVENTS_PER_CPU 8000 /* in a second */
#define STOPPED_PER_SECOND 100 /* kept for later, on each CPU */
#define PORT_BITS 16
