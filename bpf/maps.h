/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Every table. Each says who writes it, who reads it, how long an entry lives
 * and why it has its size. Names end in the version of their layout; sizes
 * marked (set at load) can be changed by the loader before creation.
 */
#pragma once

#include "flow.h"
#include "service.h"
#include "reasons.h"

/*
 * A table that grows: it begins with GROWS_FROM entries, and when it is full the engine puts a larger copy in its
 * place. A table's buckets are as many as it may ever have entries, so a large one costs megabytes while it is empty.
 * Programs look into the only slot of NAME_now (grown_find()); nobody but the engine writes such a table.
 */
#define GROWS_FROM 16384
#define GROWING(name, key_type, value_type)                                    \
	struct name##_table {                                                  \
		__uint(type, BPF_MAP_TYPE_HASH);                               \
		__uint(map_flags, BPF_F_NO_PREALLOC);                          \
		__uint(max_entries, GROWS_FROM);                               \
		__type(key, key_type);                                         \
		__type(value, value_type);                                     \
	} name SEC(".maps");                                                   \
	struct {                                                               \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                      \
		__uint(max_entries, 1);                                        \
		__type(key, __u32);                                            \
		__array(values, struct name##_table);                          \
	} name##_now SEC(".maps") = { .values = { [0] = &name } }

/* Flows that saw packets both ways, and TCP's first ones where a dead entry was or on credit. Written by the tc
 * programs and, of Services' flows, by the engine; read by them and `status`.
 * An entry lives until `expires`, or until the table needs its room (LRU).
 * Size: connections a node carries (set at load); 160 bytes each. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct ct_key);
	__type(value, struct ct_entry);
} mst_ct_v1 SEC(".maps");

/* Flows not yet answered, on tuples that have no place in the table above, nor credit for one: apart, so that a flood of
 * them evicts only its own kind.
 * Writers, readers and life as above. Size: what a flood may hold. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct ct_key);
	__type(value, struct ct_entry);
} mst_ct_new_v1 SEC(".maps");

/* TCP flows between pods, with the outside and of clients there, each at the place that its tuple gives, while there is room. Written by the
 * tc programs and, of Services' flows, by the engine; an entry lives until `expires`, or until another flow of its place
 * comes when it has been closed for CT_NEAR_CLOSED. Size: as many flows as a client has ports, 128 bytes each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, NEAR_PLACES);
	__type(key, __u32);
	__type(value, struct near_place);
} mst_ct_near_v1 SEC(".maps");

/* What this CPU has just decided about new flows between two pods. Written and read by the tc programs; an entry holds
 * for PAIR_LIFETIME. Size: pairs that open connections at once. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PAIR_SLOTS);
	__type(key, __u32);
	__type(value, struct pair);
} mst_pairs_v1 SEC(".maps");

/* How many flows may begin in the big table, each for one that has proved itself. Written and read
 * by the tc programs with a flow's first packet and the one that proves it; up to CT_CREDIT. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __s32);
} mst_credit_v1 SEC(".maps");

/* Decisions about the flows that a CPU has just seen, so that an established packet needs no look
 * into the big tables. Written and read by the tc programs; an entry holds for FAST_LIFETIME, and
 * gives way to any other flow of its slot. Size: flows that are busy at once, four slots each. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FAST_SLOTS);
	__type(key, __u32);
	__type(value, struct fast_flow);
} mst_fast_v1 SEC(".maps");

/* The same, looked at first: of a client that opens one connection after the other, each takes the
 * slot of one that has closed, which is still in the cache. A flow that finds its slot there taken
 * by one that lives goes to the table above. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fast_front);
} mst_fast_front_v1 SEC(".maps");

/* Counts, by hash of the tuple, how often a flow was entered or removed: what was decided before
 * holds no more. Written and read by the tc programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FAST_SLOTS);
	__type(key, __u32);
	__type(value, __u32);
} mst_fast_generations_v1 SEC(".maps");

/* The key of vouchers. Drawn by lot by the engine, once; read by programs at pods where one's hook comes
 * behind another's. All zero: nobody vouches. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct voucher_key);
} mst_voucher_v1 SEC(".maps");

/* Ports of the node itself that are no Service's. Written and read by the program at the NIC; an
 * entry holds for NOBODY_LIFETIME. Size: ports that a node's own traffic goes to at once. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NOBODY_SLOTS);
	__type(key, __u32);
	__type(value, struct nobody);
} mst_nobody_v1 SEC(".maps");

/* Ports of fragmented datagrams, from the first fragment. Written and read by the tc
 * programs; an entry lives FRAG_LIFETIME. Size: datagrams in flight at once. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct frag_key);
	__type(value, struct frag_ports);
} mst_frags_v1 SEC(".maps");

/* Frontends. Written by the reconciler; read on a flow's first packet and at connect().
 * Lives as long as the Service. Size: frontends plus addresses. */
GROWING(mst_services_v2, struct service_key, struct service);

/* Ports that some frontend has, or once had, or some masqueraded flow (lib/wear.h): 64 a word, by the number in the
 * host's order. Written by the engine before the frontend, by from_pod before the flow's first packet; read at the
 * edge for each packet to the node itself. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} mst_frontend_ports_v1 SEC(".maps");

/* Ports of frontends that clients outside used and that have gone: as mst_frontend_ports. Connections may go on there.
 * Written by the engine before the frontend goes; read at the edge where a port or an address is nobody's. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} mst_gone_ports_v1 SEC(".maps");

/* (Service, slot) → backend id. Written by the reconciler, read after mst_services.
 * Size: endpoints over all Services. */
GROWING(mst_slots_v1, struct slot_key, __u32);

/* Backend id → address and port. Written by the reconciler, read after mst_slots.
 * Size: distinct backends. */
GROWING(mst_backends_v1, __u32, struct backend);

/* (Client, Service) → backend, of Services with affinity. Written and read by the programs on a
 * flow's first packet and at connect(). An entry lives until `expires`, which each new flow moves;
 * LRU. Size: clients of such Services at once. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} mst_affinity_v1 SEC(".maps");

/* Who may use a frontend marked SVC_RANGES. Written by the reconciler, read where one is found.
 * Lives as long as the Service. Size: ranges over all Services. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct source_key);
	__type(value, __u8);
} mst_sources_v1 SEC(".maps");

/* Endpoint id → endpoint. Written by the reconciler, read for every packet.
 * An array, so that a lookup is an addition. Size: pods of one node, with room. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct endpoint);
} mst_endpoints_v1 SEC(".maps");

/* Address → endpoint id, for the node's own pods. Written by the reconciler, read on a
 * flow's first packet. Size: two addresses and some to spare for each endpoint. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct addr);
	__type(value, __u32);
} mst_endpoint_addrs_v1 SEC(".maps");

/* Addresses that some endpoint has, or once had: 64 a word, by endpoint_bit(). Written by the engine before
 * mst_endpoint_addrs, read at the NIC for each packet that is not to the node itself. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} mst_endpoint_bits_v1 SEC(".maps");

/* Links whose children are pods. Written by the engine with the first and last such endpoint,
 * read for every packet that leaves by one. Size: NICs of a node, with room. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct parent);
} mst_parents_v1 SEC(".maps");

/* (Parent, child) → endpoint id, 0 for a child of the node's own. Written by the engine,
 * read for every packet that leaves by a parent. Size: one for each endpoint inside a pod. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct child_key);
	__type(value, __u32);
} mst_children_v1 SEC(".maps");

/* Endpoint id → policy sets. Written by the reconciler before the endpoint's own slot, and
 * emptied after it; read on a flow's first packet. Size: that of mst_endpoints. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct endpoint_policy);
} mst_policies_v1 SEC(".maps");

/* Address → who has it: pods of all nodes that some rule selects, single addresses in rules'
 * blocks, the node's own. Written by the reconciler, read on a flow's first packet when an end
 * is isolated. Size: such addresses. */
GROWING(mst_identities_v1, struct addr, struct identity);

/* Prefix → prefix identity, for blocks of more than one address. Writer and reader as above;
 * read for rules with blocks only. Size: distinct prefixes (set at load). */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct prefix_key);
	__type(value, __u64);
} mst_prefixes_v1 SEC(".maps");

/* (Policy set, identity) → what is allowed. Writer and reader as above. Size: peers over all
 * sets. */
GROWING(mst_peers_v1, struct peer_key, struct peer_rules);

/* (List of ports, protocol, port prefix) → rule. Writer and reader as above; a list never
 * changes. Size: ports over all distinct lists. */
GROWING(mst_ports_v1, struct port_key, __u32);

/* The judgment under way on each CPU. Written and read by the programs; valid from a question to
 * the end of the packet. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct judgment);
} mst_judgment_v1 SEC(".maps");

/* Namespace cookie → endpoint: which sockets are ours. Written by the reconciler, read by
 * the socket programs. Size: one for each endpoint. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct netns_info);
} mst_netns_v1 SEC(".maps");

/* How the node appears to backends, by enum edge_side. Written by the engine, read on the first
 * packet of a flow from outside and where a program speaks for the node. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, EDGE_SIDES);
	__type(key, __u32);
	__type(value, struct edge_config);
} mst_edge_v2 SEC(".maps");

/* Device → what pods wear behind it. Written by the engine, read on the first packet of a flow from a pod to
 * the outside. Size: NICs of a node, with room. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct wear);
} mst_wear_v1 SEC(".maps");

/* Endpoint id → the group of those that are masqueraded alike, 0: it is not. Written by the engine before the
 * endpoint's own slot; read as the table above. Size: that of mst_endpoints. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} mst_masquerade_v1 SEC(".maps");

/* Endpoint id → the link-local address of its pod's IPv6 router, which it may not speak for, or zero. Written by the engine
 * before the endpoint's own slot; read by the tc programs. Size: that of mst_endpoints. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct addr);
} mst_routers_v1 SEC(".maps");

/* (Group, destination) → 1: no masquerade. Written by the engine before the first endpoint of its group, and
 * emptied after the last; INSIDE_ALL's when the nodes of the cluster change. Read as the tables above. Size: some
 * networks for each network of pods, and those of all nodes. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct inside_key);
	__type(value, __u8);
} mst_inside_v1 SEC(".maps");

/* What sockets were told whose slot (below) another one has, or that the kernel itself opened. Written at connect() and
 * sendmsg(), read by getpeername() and recvmsg(); lives and dies with the socket, so it has no size. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_peer);
} mst_sock_peers_v1 SEC(".maps");

/* What TCP sockets were told. Written at connect(), freed at close(), read by getpeername(), the tc programs, and who
 * removes a backend. Size: TCP sockets connected to Services, open at once. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SOCK_SLOTS);
	__type(key, __u32);
	__type(value, struct sock_slot);
} mst_sock_slots_v1 SEC(".maps");

/* The same of UDP sockets, and of an unconnected one its first Service: others' sockets cannot turn it out. Written at
 * connect() and sendmsg(), freed at close(), or by who removes a backend; read as above. Size: as above. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SOCK_SLOTS);
	__type(key, __u32);
	__type(value, struct sock_slot);
} mst_udp_slots_v1 SEC(".maps");

/* Unconnected UDP sockets that use more Services than one: the choice made for a frontend, and the way back from the
 * backend. Written and read at sendmsg(), read at recvmsg(). Two entries for each pair of socket and Service but its
 * first; LRU. Connected ones without a slot: one entry each, written at connect(), freed at close(), read by who removes
 * a backend. Size: such pairs in use at once. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct sock_flow_key);
	__type(value, struct sock_flow);
} mst_sock_flows_v1 SEC(".maps");

/* The rate of answers to refused packets, and of messages that one is too long, by the endpoint that sent it; 0: who is no
 * pod of this node. Written and read by the tc programs. Size: that of mst_endpoints. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct answers);
} mst_answers_v1 SEC(".maps");

/* Dropped packets by reason and direction. Written by every program, read by `status`. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT * DIR_COUNT);
	__type(key, __u32);
	__type(value, struct counter);
} mst_drops_v1 SEC(".maps");

/* Traffic by endpoint id. Written by the tc programs, read by `ep ls` and metrics. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct endpoint_counters);
} mst_endpoint_counters_v1 SEC(".maps");

/* Rings of events, one for each reader, made and entered by it: a node without readers pays
 * nothing. Written to by every program, while the reader's place in mst_readers says so. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, EVENT_READERS);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_RINGBUF);
		__uint(max_entries, 4096);
	});
} mst_events_v1 SEC(".maps");

/* Who reads events, and until when: place 0 for all, then one for each ring. Written by readers,
 * each its own place and the first; read at a flow's first packet, at its last, and at drops. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 + EVENT_READERS);
	__type(key, __u32);
	__type(value, struct reader);
} mst_readers_v1 SEC(".maps");

/* Where a CPU's programs put events together, and count them. Written by every program but those
 * at sockets, which may be interrupted; read by readers and metrics. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct event_room);
} mst_event_room_v1 SEC(".maps");

/* The last packets that did not pass, on each CPU, so that who asks afterwards gets an answer.
 * Written by every program, some each second; read by readers. 144 bytes each. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STOPPED_KEPT);
	__type(key, __u32);
	__type(value, struct event);
} mst_stopped_v1 SEC(".maps");

/* The rate of events by endpoint id. Written and read with each event. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct event_rate);
} mst_event_rates_v1 SEC(".maps");

/* The shared programs, by enum pod_program: entry programs call them, an upgrade replaces
 * them in place. Written by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, PROG_COUNT);
	__type(key, __u32);
	__type(value, __u32);
} mst_programs_v1 SEC(".maps");

/* The same for the node's own devices, by enum node_program. Written by the loader before it attaches what
 * calls them, or replaces it. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, NODE_PROG_COUNT);
	__type(key, __u32);
	__type(value, __u32);
} mst_node_programs_v1 SEC(".maps");

/* Facts that spare the common case a lookup. Written and read by the tc programs; they only
 * ever become true, and true for longer. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct facts);
} mst_facts_v1 SEC(".maps");

/* This node's own settings. Written by the engine, read by every packet to or from another node. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct node_config);
} mst_node_v1 SEC(".maps");

/* Other nodes, by the lower half of their reference. Written by the engine, read by every packet
 * to or from another node's pod. An array, so that a lookup is an addition. Size: nodes of a
 * cluster, with room; 32 bytes each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct remote);
} mst_remotes_v1 SEC(".maps");

/* Pods' networks of other nodes → their reference. Written by the engine, read on a flow's first
 * packet. Size: some networks for each node. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct prefix);
	__type(value, __u32);
} mst_remote_nets_v1 SEC(".maps");

/* Address between nodes → the reference of the node that has it, tunnel or not. Written by the engine, read for
 * packets that come by the tunnel, and for flows that a node itself opens. Size: two addresses for each node. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 8192);
	__type(key, struct addr);
	__type(value, __u32);
} mst_tunnel_peers_v1 SEC(".maps");

/* Who wrote these tables, and the last numbers given out. Written and read by the engine. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct meta);
} mst_meta_v1 SEC(".maps");
