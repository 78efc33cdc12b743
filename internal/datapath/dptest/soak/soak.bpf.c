// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Sends millions of flows through from_pod without a system call for each: a
 * test run repeats this program, which writes the next packet over the last one
 * and calls the real one. Flow i is of kind i % KINDS, to Service i % services.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../../bpf/types.h"
#include "../../../../bpf/lib/btf.h"

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, PROG_COUNT);
	__type(key, __u32);
	__type(value, __u32);
} mst_programs_v1 SEC(".maps");

/* A pod, as its packets show it. */
struct end {
	struct addr ip4;
	struct addr ip6;
	__u8 mac[6];
	__u8 node_mac[6];
	__u32 id;
};

const volatile struct end client;
const volatile struct end server;
const volatile struct addr vip4; /* of Service 0; the others follow in the last two bytes */
const volatile struct addr vip6;
const volatile __u32 services = 1;
const volatile __u8 ipv6 = 0;

#define SERVICE_PORT 80
#define BACKEND_PORT 8000 /* of Service 0 */
#define FIRST_PORT 1024
#define PORTS 64000

enum { SYN = 2, RST = 4, ACK = 16, FIN = 1, STEPS = 6, KINDS = 4, ROW = 8 };

/* The flags of a step's packet by kind of flow; 0: none. Steps 1 and 4 are the server's. */
const volatile __u8 script[KINDS * ROW] = {
	SYN, SYN | ACK, ACK, FIN | ACK, FIN | ACK, ACK, 0, 0, /* closes */
	SYN, 0, 0, 0, 0, 0, 0, 0,                             /* is never answered */
	SYN, SYN | ACK, ACK, ACK, ACK, ACK, 0, 0,             /* falls silent */
	SYN, SYN | ACK, ACK, RST, 0, 0, 0, 0,                 /* is reset */
};

__u64 next;    /* packet */
__u64 sent[2]; /* by the client, by the server */

struct segment4 {
	struct ethhdr eth;
	struct iphdr ip;
	struct tcphdr tcp;
} __attribute__((packed));

struct segment6 {
	struct ethhdr eth;
	struct ipv6hdr ip;
	struct tcphdr tcp;
} __attribute__((packed));

static __always_inline void link(struct ethhdr *eth, const volatile struct end *from, __be16 proto)
{
	for (int i = 0; i < ETH_ALEN; i++) {
		eth->h_dest[i] = from->node_mac[i];
		eth->h_source[i] = from->mac[i];
	}
	eth->h_proto = proto;
}

static __always_inline struct tcphdr segment(__u16 sport, __u16 dport, __u8 flags)
{
	struct tcphdr tcp = { .source = bpf_htons(sport), .dest = bpf_htons(dport), .doff = sizeof(tcp) / 4 };

	((__u8 *)&tcp)[13] = flags;
	return tcp;
}

static __always_inline int write4(struct __sk_buff *skb, bool reply, __u32 service, __u16 sport, __u16 dport, __u8 flags)
{
	struct iphdr ip = { .version = 4, .ihl = 5, .ttl = 64, .protocol = IPPROTO_TCP };
	struct segment4 s = {};
	__u32 sum = 0;

	ip.tot_len = bpf_htons(sizeof(s.ip) + sizeof(s.tcp));
	ip.saddr = reply ? server.ip4.words[3] : client.ip4.words[3];
	ip.daddr = reply ? client.ip4.words[3] : bpf_htonl(bpf_ntohl(vip4.words[3]) + service);
	for (int i = 0; i < (int)sizeof(ip) / 2; i++)
		sum += ((__u16 *)&ip)[i];
	sum = (sum & 0xffff) + (sum >> 16);
	ip.check = ~(sum + (sum >> 16));
	link(&s.eth, reply ? &server : &client, bpf_htons(ETH_P_IP));
	s.ip = ip;
	s.tcp = segment(sport, dport, flags);
	return bpf_skb_store_bytes(skb, 0, &s, sizeof(s), 0);
}

static __always_inline int write6(struct __sk_buff *skb, bool reply, __u32 service, __u16 sport, __u16 dport, __u8 flags)
{
	struct segment6 s = {};
	struct addr from = reply ? server.ip6 : client.ip6, to = reply ? client.ip6 : vip6;

	if (!reply)
		to.words[3] = bpf_htonl(bpf_ntohl(to.words[3]) + service);
	link(&s.eth, reply ? &server : &client, bpf_htons(ETH_P_IPV6));
	s.ip.version = 6;
	s.ip.hop_limit = 64;
	s.ip.nexthdr = IPPROTO_TCP;
	s.ip.payload_len = bpf_htons(sizeof(s.tcp));
	__builtin_memcpy(&s.ip.saddr, &from, sizeof(from));
	__builtin_memcpy(&s.ip.daddr, &to, sizeof(to));
	s.tcp = segment(sport, dport, flags);
	return bpf_skb_store_bytes(skb, 0, &s, sizeof(s), 0);
}

SEC("tc")
int soak(struct __sk_buff *skb)
{
	__u64 n = next++, flow = n / STEPS;
	__u32 step = n % STEPS, at = flow % KINDS * ROW + step, service = flow % services, id;
	__u16 port = FIRST_PORT + flow / services % PORTS;
	bool reply = step == 1 || step == 4;
	__u8 flags;
	__u16 sport = reply ? BACKEND_PORT + service : port, dport = reply ? port : SERVICE_PORT;

	asm volatile("" : "+r"(at)); /* so that the verifier sees the bound */
	flags = script[at & (KINDS * ROW - 1)];
	if (!flags)
		return TC_ACT_OK;
	if (ipv6 ? write6(skb, reply, service, sport, dport, flags) : write4(skb, reply, service, sport, dport, flags))
		return TC_ACT_SHOT;
	sent[reply]++;
	id = reply ? server.id : client.id;
	skb->cb[CB_ENDPOINT] = id;
	bpf_tail_call(skb, &mst_programs_v1, PROG_FROM_POD_HOST);
	return TC_ACT_SHOT;
}

char __license[] SEC("license") = "Dual BSD/GPL";
