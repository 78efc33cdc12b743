/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Why a packet was dropped. Append only: a number, once given, keeps its
 * meaning. Each carries what people read: a sentence, and under "mend:" what to
 * do about it. Go's table and docs/reasons.md are generated from the comments.
 */
#pragma once

enum drop_reason {
	REASON_NONE = 0, /* not dropped
		* mend: nothing */
	REASON_NO_PROGRAM = 1, /* the shared program is not loaded
		* mend: `mustang status` lists the programs; adding any endpoint (`mustang ep add`) loads them, or `mustang reset` and start anew */
	REASON_NO_ENDPOINT = 2, /* the interface has no endpoint entry
		* mend: `mustang ep ls` lists the endpoints: the pod was removed, or its ADD was interrupted, which the next command finishes; otherwise `mustang ep add` */
	REASON_ETHERTYPE = 3, /* neither IPv4, IPv6 nor ARP
		* mend: send IPv4 or IPv6 without a VLAN tag; other protocols do not pass */
	REASON_TRUNCATED = 4, /* the packet ends inside a header
		* mend: the sender builds broken packets: capture one at the pod (`tcpdump -XX`) and mend the program that makes it */
	REASON_BAD_LENGTH = 5, /* a length field contradicts the packet
		* mend: the sender builds broken packets: capture one at the pod (`tcpdump -XX`) and mend the program that makes it */
	REASON_BAD_HEADER = 6, /* a header field has a value its standard forbids
		* mend: the sender builds broken packets: capture one at the pod (`tcpdump -XX`) and mend the program that makes it */
	REASON_EXT_HEADERS = 7, /* more IPv6 extension headers than are followed (6)
		* mend: send fewer extension headers */
	REASON_SPOOFED_MAC = 8, /* the source MAC address is not the pod's
		* mend: let the pod send from the MAC address of its own interface (`mustang ep ls` shows it); after changing that on purpose, remove and add the endpoint */
	REASON_SPOOFED_ADDRESS = 9, /* the source address, or the one that it tells neighbours of, is not the pod's; or it speaks as a router
		* mend: let the pod send from the address it was given (`mustang ep ls` shows it); for another one remove the endpoint and add it again */
	REASON_FRAG_TINY = 10, /* the first fragment does not hold the transport header
		* mend: only attacks and broken senders make such fragments; send larger ones */
	REASON_FRAG_OVERLAP = 11, /* a later fragment would overwrite the transport header
		* mend: only attacks and broken senders make such fragments; send larger ones */
	REASON_FRAG_NO_FIRST = 12, /* a fragment came before its first one
		* mend: the sender repeats the datagram, or should: send datagrams that fit the MTU, so that none is fragmented */
	REASON_NO_BACKEND = 13, /* the Service has no backend
		* mend: give the Service a backend (`mustang svc add --replace`), or see why none of its pods is ready */
	REASON_SERVICE_PORT = 14, /* the address is a Service's, but not this port and protocol
		* mend: use a port that the Service has (`mustang svc ls`), or add this one to it */
	REASON_MIDSTREAM_NAT = 15, /* a packet in the middle of a translated flow whose entry is gone
		* mend: the connection was idle for too long, or its backend is gone: connect again */
	REASON_CT_FULL = 16, /* the flow table took no new entry
		* mend: the node's flow tables had no room at that moment: send again; if it goes on, close connections (`mustang status` shows the tables' use) */
	REASON_NAT_PORTS = 17, /* no free source port for a translated flow
		* mend: too many connections to one backend, or from masqueraded pods to one port outside: give the Service more backends, or close connections */
	REASON_NAT_FAILED = 18, /* rewriting the packet failed
		* mend: only TCP, UDP and SCTP can be sent to a Service, and from a masqueraded pod to the outside only these and echoes; for these, the kernel refused to change the packet: report it with the output of `mustang status` */
	REASON_DELIVER = 19, /* handing the packet to the pod failed
		* mend: the interface of the receiving pod is going or gone; if it stays, report it with the output of `mustang status` */
	REASON_ICMP_ERROR_NAT = 20, /* an ICMP error about a translated flow could not be translated
		* mend: the error quotes too little of the packet that it is about; whoever sent it must quote its transport header */
	REASON_ICMP_ERROR_FLOW = 21, /* an ICMP error about a flow that is not known
		* mend: nothing: the flow that it is about has ended, or never was */
	REASON_UNKNOWN_CHILD = 22, /* a child of the parent link that is no endpoint sent it: not made by mustang
		* mend: make pods on that link by mustang only (`mustang pod add`), or give the other ones another link */
	REASON_HOOK_BYPASSED = 23, /* it left the pod past the program on the pod's own interface
		* mend: a program in the pod sends past the tc layer (packet socket with PACKET_QDISC_BYPASS): let it use ordinary sockets */
	REASON_WIRE_SPOOFED = 24, /* it came in from the wire with the address of a pod of this node
		* mend: another machine uses the address of a pod: give every node its own range of pod addresses, or find the sender by its MAC address (`tcpdump -e`) */
	REASON_TUNNEL_PEER = 25, /* it came by the tunnel from an address that is no node's, or to another than this node has between nodes
		* mend: if a node sent it, make that node known here by the address that it sends from (`mustang node ls`, `mustang node add`); otherwise let nobody else reach the tunnel's port */
	REASON_TUNNEL_SOURCE = 26, /* it came by the tunnel from an address that is not of the sending node's pods, or from that of a pod behind the tunnel, and not by it
		* mend: make all ranges of that node's pod addresses known here: `mustang node ls` shows them, `mustang node add` replaces them; take away routes of your own to them (`ip route get`) */
	REASON_TUNNEL_VNI = 27, /* it came by the tunnel with another network's number (VNI)
		* mend: give all nodes the same VNI (`mustang node set`) */
	REASON_NO_REMOTE = 28, /* it was sent into the tunnel, and no node has its destination
		* mend: make the node that has the destination known here (`mustang node add`), or take away the route that leads into the tunnel (`ip route get`) */
	REASON_ENCAP = 29, /* pushing the tunnel's headers failed
		* mend: the kernel refused to make the packet longer: let pods send smaller ones (`mustang status` says how large); if they are, report it with the output of `mustang status` */
	REASON_NO_LOCAL_BACKEND = 30, /* the Service's traffic policy is Local, and this node has no backend of it
		* mend: send to a node that has a backend, run one here, or make the Service's traffic policy Cluster */
	REASON_SOURCE_RANGE = 31, /* the client's address is in none of the Service's loadBalancerSourceRanges
		* mend: add the client's address to the Service's loadBalancerSourceRanges, or take them away */
	REASON_NO_ROUTE = 32, /* no route for a packet of a client outside
		* mend: give the node a route: `ip route get` says where the packet would go */
	REASON_POLICY_INGRESS = 33, /* policies select the receiving pod, and no ingress rule of theirs allows the packet
		* mend: allow it by an ingress rule of a NetworkPolicy that selects the receiving pod; `mustang why` writes it */
	REASON_POLICY_EGRESS = 34, /* policies select the sending pod, and no egress rule of theirs allows the packet
		* mend: allow it by an egress rule of a NetworkPolicy that selects the sending pod; `mustang why` writes it */
	REASON_POLICY_INCOMPLETE = 35, /* the rule that might allow it did not fit into a table
		* mend: `mustang policy ls` says which rule and which table; make rules, or the addresses in them, fewer */
	REASON_POLICY_UNKNOWN = 36, /* the pod is not known yet, so nobody can say which policies select it
		* mend: wait until the pod's labels are known; when that lasts, see whether the agent reaches Kubernetes */
	REASON_SCTP_FRAGMENT = 37, /* an SCTP packet in fragments needs another port, and with it a checksum that only the whole packet gives
		* mend: let the sender keep to the path's MTU, as it does unless told otherwise (`SCTP_PEER_ADDR_PARAMS`: SPP_PMTUD_ENABLE), or give the Service the port that its backends have */
	REASON_TUNNEL_PORT = 38, /* a pod that is masqueraded, any pod to a node, or a client outside by a Service, sends to the port of the nodes' tunnel, where under its node's address its packet would be the node's
		* mend: let the pod, or the Service's backend, use another UDP port, give the tunnel another (`mustang node set --port`), or exclude a destination that is no node from masquerade */
	REASON_HOP_LIMIT = 39, /* the hop limit of a client's packet ran out here, on its way to a backend elsewhere
		* mend: where Services lead to each other's node ports in a circle, give one of them other backends; else let the client's packets have a larger hop limit */
	REASON_TOO_LONG = 40, /* a packet of a client outside, an answer to one, or a masqueraded pod's, is longer than its way takes, which its sender is told
		* mend: nothing, where senders heed what they are told; else let ICMP errors reach them (type 3 code 4, ICMPv6 type 2), or give the way a larger MTU */
	REASON_COUNT = 41,
};
