// SPDX-License-Identifier: Apache-2.0

package datapath

// SkBuff is struct __sk_buff of linux/bpf.h: what a packet brings along beside
// its bytes in a test run (BPF_PROG_TEST_RUN), and takes from it.
type SkBuff struct {
	Len            uint32
	PktType        uint32
	Mark           uint32
	QueueMapping   uint32
	Protocol       uint32
	VlanPresent    uint32
	VlanTci        uint32
	VlanProto      uint32
	Priority       uint32
	IngressIfindex uint32
	Ifindex        uint32
	TcIndex        uint32
	Cb             [5]uint32
	Hash           uint32
	TcClassid      uint32
	Data           uint32
	DataEnd        uint32
	NapiID         uint32
	Family         uint32
	RemoteIP4      uint32
	LocalIP4       uint32
	RemoteIP6      [4]uint32
	LocalIP6       [4]uint32
	RemotePort     uint32
	LocalPort      uint32
	DataMeta       uint32
	FlowKeys       uint64
	Tstamp         uint64
	WireLen        uint32
	GsoSegs        uint32
	Sk             uint64
	GsoSize        uint32
	TstampType     uint8
	Pad            [3]uint8
	Hwtstamp       uint64
}

// What a tc program answers.
const (
	VerdictNext     = -1 // TC_ACT_UNSPEC: the kernel goes on with it
	VerdictDrop     = 2  // TC_ACT_SHOT
	VerdictRedirect = 7  // TC_ACT_REDIRECT
)
