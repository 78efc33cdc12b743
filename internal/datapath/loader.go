// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	cryptorand "crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// variant is one way in which the pod programs are loaded.
type variant struct {
	inPod, deliverEgress, fromWire, fromEdge uint8  // load-time constants, bpf/config.h
	fromPod, toPod                           uint32 // slots of mst_programs
}

// noSlot: the variant has no such direction.
const noSlot = bpfgen.ProgCount

var (
	hostVariant   = variant{fromPod: bpfgen.ProgFromPodHost, toPod: bpfgen.ProgToPodHost}
	innerVariant  = variant{inPod: 1, fromPod: bpfgen.ProgFromPodInner, toPod: bpfgen.ProgToPodInner}
	netkitVariant = variant{deliverEgress: 1, fromPod: bpfgen.ProgFromPodNetkit, toPod: bpfgen.ProgToPodNetkit}
	wireVariant   = variant{fromWire: 1, fromPod: noSlot, toPod: bpfgen.ProgToPodWire}
	edgeVariant   = variant{fromEdge: 1, fromPod: noSlot, toPod: bpfgen.ProgToPodEdge}
)

// variantOf is what ep's hooks call.
func variantOf(ep state.Endpoint) variant {
	switch {
	case ep.Placement == state.InPod:
		return innerVariant
	case ep.Attach == AttachNetkit:
		return netkitVariant
	}
	return hostVariant
}

// programNames name the slots of mst_programs: the pins, and what status shows.
var programNames = [bpfgen.ProgCount]string{
	bpfgen.ProgFromPodHost:  "from_pod_host",
	bpfgen.ProgToPodHost:    "to_pod_host",
	bpfgen.ProgFromPodInner: "from_pod_inner",
	bpfgen.ProgToPodInner:   "to_pod_inner",

	bpfgen.ProgFromPodNetkit: "from_pod_netkit",
	bpfgen.ProgToPodNetkit:   "to_pod_netkit",
	bpfgen.ProgToPodWire:     "to_pod_wire",
	bpfgen.ProgToPodEdge:     "to_pod_edge",
}

// programHooks say where those are called, for people.
var programHooks = [bpfgen.ProgCount]string{
	bpfgen.ProgFromPodHost:  "host end, tc ingress",
	bpfgen.ProgToPodHost:    "host end, tc egress",
	bpfgen.ProgFromPodInner: "in pod, tc egress",
	bpfgen.ProgToPodInner:   "in pod, tc ingress",

	bpfgen.ProgFromPodNetkit: "netkit, peer",
	bpfgen.ProgToPodNetkit:   "netkit, primary",
	bpfgen.ProgToPodWire:     "NIC, tc ingress",
	bpfgen.ProgToPodEdge:     "edge, tc ingress",
}

// Build identifies the programs of this binary on this kernel: a hash of the
// objects and of the constants they are loaded with.
func Build() [32]byte { return buildWith(Probe().SetRetval) }

func buildWith(setRetval bool) [32]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%s set_retval=%t", bpfgen.ObjectsHash, setRetval))
}

// isBuild says whether build is this binary's. It asks the kernel nothing: as
// long as a node's tables live, its kernel is the same, and so are the constants.
func isBuild(build [32]byte) bool {
	return build == buildWith(true) || build == buildWith(false)
}

// ofAnother says whether a node has programs, and they are not this binary's.
func ofAnother(build [32]byte) bool { return build != [32]byte{} && !isBuild(build) }

// begun is in the place of a build while programs are replaced. Whoever finds it there, be it the build of before, replaces
// all of them: some may be another's.
var begun = sha256.Sum256([]byte("an upgrade has begun"))

// beginUpgrade says so, before anything that another build's programs go by changes.
func (d *Datapath) beginUpgrade() error {
	meta, err := d.GetMeta()
	if err != nil || meta.Build == [32]byte{} {
		return err
	}
	meta.Build = begun
	return d.PutMeta(meta)
}

// EnsurePrograms loads the shared programs that are missing, and replaces all
// of them in place when another build left its own: entry programs call by
// slot, so no packet meets a gap.
// Besides the variant for host ends, a node has those that its endpoints called
// for; ep calls for its own.
func (d *Datapath) EnsurePrograms(ep state.Endpoint) error {
	meta, err := d.GetMeta()
	if err != nil {
		return err
	}
	same := isBuild(meta.Build)
	if !same {
		if err := d.drawVoucherKey(); err != nil {
			return err
		}
	}
	if ofAnother(meta.Build) {
		if err := errors.Join(d.beginUpgrade(), d.lookElsewhere(), d.rememberShadows()); err != nil {
			return err
		}
	}
	for _, v := range []variant{hostVariant, innerVariant, netkitVariant, wireVariant, edgeVariant} {
		filled := d.filled(v)
		wanted := filled || v == hostVariant || v == variantOf(ep)
		if !wanted || filled && same {
			continue
		}
		if err := d.loadVariant(v); err != nil {
			return err
		}
	}
	if same {
		return nil
	}
	if err := errors.Join(d.upgradeSock(), d.upgradeParents(), d.upgradeWire(), d.upgradeEdges(),
		d.upgradeEntries(), d.forgetFilterPrograms()); err != nil {
		return err
	}
	if err := errors.Join(d.fillNear(), d.rememberShadows()); err != nil {
		return err
	}
	// Last, so that an upgrade that fails or is killed is done again. The engine owns the other
	// fields; nothing changed them since.
	meta.Build = Build()
	return d.PutMeta(meta)
}

// drawVoucherKey gives the node's programs the key of bpf/lib/voucher.h, if
// they have none yet: attached programs go on with the one that is there.
func (d *Datapath) drawVoucherKey() error {
	key, _, err := d.voucher.Get(0)
	if err != nil || key != (bpfgen.PodVoucherKey{}) {
		return err
	}
	var lot [unsafe.Sizeof(key)]byte
	cryptorand.Read(lot[:]) // never fails
	if _, err := binary.Decode(lot[:], binary.NativeEndian, &key); err != nil {
		return fmt.Errorf("draw the key of vouchers: %w", err)
	}
	return d.voucher.Put([]uint32{0}, []bpfgen.PodVoucherKey{key})
}

// Current says whether the node's programs are this binary's.
func (d *Datapath) Current() (bool, error) {
	meta, err := d.GetMeta()
	return isBuild(meta.Build), err
}

// OfAnother says whether the node has programs, and they are another build's.
func (d *Datapath) OfAnother() (bool, error) {
	meta, err := d.GetMeta()
	return ofAnother(meta.Build), err
}

func (d *Datapath) filled(v variant) bool {
	return (v.fromPod == noSlot || d.slotFilled(v.fromPod)) && d.slotFilled(v.toPod)
}

func (d *Datapath) slotFilled(slot uint32) bool {
	var id uint32
	return d.held(bpfgen.PodMapMstProgramsV1).Lookup(slot, &id) == nil
}

// ensureVariant loads what a node's devices call, if it is missing.
func (d *Datapath) ensureVariant(v variant) error {
	if d.filled(v) {
		return nil
	}
	return d.loadVariant(v)
}

// loadVariant loads both directions and puts them into their slots.
func (d *Datapath) loadVariant(v variant) error {
	parsed, err := podSpec()
	if err != nil {
		return err
	}
	spec := parsed.Copy()
	if err := setConstants(spec, map[string]any{
		bpfgen.PodVarInPod:         v.inPod,
		bpfgen.PodVarDeliverEgress: v.deliverEgress,
		bpfgen.PodVarFromWire:      v.fromWire,
		bpfgen.PodVarFromEdge:      v.fromEdge,
		bpfgen.PodVarAnswerKey:     rand.Uint32(),
	}); err != nil {
		return err
	}
	if v.fromPod == noSlot {
		delete(spec.Programs, bpfgen.PodProgFromPod)
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: d.replacements(spec)})
	if err != nil {
		return loadError("pod programs", err)
	}
	defer coll.Close()
	table := d.held(bpfgen.PodMapMstProgramsV1)
	for name, slot := range map[string]uint32{bpfgen.PodProgFromPod: v.fromPod, bpfgen.PodProgToPod: v.toPod} {
		prog := coll.Programs[name]
		if prog == nil {
			continue
		}
		if slot >= table.MaxEntries() {
			return layoutError(bpfgen.PodMapMstProgramsV1, fmt.Errorf("%d slots", table.MaxEntries()))
		}
		if err := table.Put(slot, prog); err != nil {
			return fmt.Errorf("install %s: %w", programNames[slot], err)
		}
		if err := replacePin(d, prog, filepath.Join(d.dir, programsDir, programNames[slot])); err != nil {
			return err
		}
	}
	return nil
}

// loadError adds the verifier's last words, and what to do about a kernel that
// lacks something.
func loadError(what string, err error) error {
	if ve := (*ebpf.VerifierError)(nil); errors.As(err, &ve) {
		return fmt.Errorf("load %s: the kernel refused them: %w; `mustang status` shows what this kernel lacks", what, err)
	}
	return fmt.Errorf("load %s: %w", what, err)
}

// pinnable is a program or a table.
type pinnable[T any] interface {
	Clone() (T, error)
	Pin(path string) error
	Close() error
}

// replacePin pins p at path whatever was there: beside, then renamed, so that
// the path always names one of them. bpffs allows no dots, and what is pinned
// beside a table would be taken for one: so both lie in programsDir.
func replacePin[T pinnable[T]](d *Datapath, p T, path string) error {
	beside := filepath.Join(d.dir, programsDir, filepath.Base(path)+"-new")
	if err := removePin(beside); err != nil {
		return err
	}
	clone, err := p.Clone() // a clone does not remember other pins
	if err != nil {
		return err
	}
	defer clone.Close()
	if err := clone.Pin(beside); err != nil {
		return fmt.Errorf("pin %s: %w", filepath.Base(path), err)
	}
	if err := os.Rename(beside, path); err != nil {
		return fmt.Errorf("pin %s: %w", filepath.Base(path), err)
	}
	return nil
}

func removePin(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}

// Placeholders in the entry program, bpf/entry.bpf.c.
const (
	placeEndpoint = 0x6d73740000000001
	placeProgram  = 0x6d73740000000002
)

// entryProgram loads the program of one attachment by a link.
func (d *Datapath) entryProgram(endpoint, slot uint32) (*ebpf.Program, error) {
	return loadEntry(EntrySpec(endpoint, slot, d.tables()))
}

// filterProgram is the program of all filters that call slot. It is pinned:
// adding a filter loads nothing.
func (d *Datapath) filterProgram(slot uint32) (*os.File, error) {
	pin := filepath.Join(d.dir, programsDir, filterPinPrefix+programNames[slot])
	f, err := openPin(pin)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	p, err := loadEntry(entryOf(bpfgen.EntryProgFilterEntry, 0, slot, d.tables()))
	if err != nil {
		return nil, err
	}
	defer p.Close()
	if err := replacePin(d, p, pin); err != nil {
		return nil, err
	}
	return openPin(pin)
}

// openPin opens what is pinned at path and asks the kernel nothing about it. The
// library would, in ways that take longer than the rest of adding a filter.
func openPin(path string) (*os.File, error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return nil, err
	}
	attr := struct {
		pathname unsafe.Pointer
		fd       uint32
		flags    uint32
	}{pathname: unsafe.Pointer(name)}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(name)
	if errno != 0 {
		return nil, fmt.Errorf("open pin %s: %w", path, errno)
	}
	return os.NewFile(fd, path), nil
}

// filterPinPrefix stands before the name of the program that a filter's calls.
const filterPinPrefix = "filter_"

// forgetFilterPrograms lets new filters get this binary's; old ones keep what
// they have.
func (d *Datapath) forgetFilterPrograms() error {
	var errs []error
	for _, name := range programNames {
		errs = append(errs, removePin(filepath.Join(d.dir, programsDir, filterPinPrefix+name)))
	}
	return errors.Join(errs...)
}

func loadEntry(spec *ebpf.ProgramSpec, err error) (*ebpf.Program, error) {
	if err != nil {
		return nil, err
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		return nil, loadError("entry program", err)
	}
	return p, nil
}

// EntrySpec is the program of one attachment by a link, with the tables it uses.
func EntrySpec(endpoint, slot uint32, tables map[string]*ebpf.Map) (*ebpf.ProgramSpec, error) {
	return entryOf(bpfgen.EntryProgEntry, endpoint, slot, tables)
}

func loadEntrySpec() (*ebpf.CollectionSpec, error) {
	spec, err := bpfgen.LoadEntry()
	if err == nil {
		Specialize(spec)
	}
	return spec, err
}

// entryOf fills in the placeholders of the named program. It goes without type
// information, which would take ten times as long to load as the program.
func entryOf(name string, endpoint, slot uint32, tables map[string]*ebpf.Map) (*ebpf.ProgramSpec, error) {
	parsed, err := entrySpec()
	if err != nil {
		return nil, err
	}
	spec := parsed.Programs[name]
	insns := make(asm.Instructions, len(spec.Instructions))
	for i, from := range spec.Instructions {
		to := asm.Instruction{OpCode: from.OpCode, Dst: from.Dst, Src: from.Src, Offset: from.Offset, Constant: from.Constant}
		switch {
		case from.IsLoadFromMap():
		case from.Constant == placeEndpoint:
			to.Constant = int64(endpoint)
		case from.Constant == placeProgram:
			to.Constant = int64(slot)
		}
		to = to.WithSymbol(from.Symbol())
		if name := from.Reference(); name != "" {
			to = to.WithReference(name)
		}
		insns[i] = to
		if m := tables[from.Reference()]; m != nil && from.IsLoadFromMap() {
			if err := insns[i].AssociateMap(m); err != nil {
				return nil, fmt.Errorf("entry program: %w", err)
			}
		}
	}
	return &ebpf.ProgramSpec{Name: spec.Name, Type: spec.Type, License: spec.License, Instructions: insns}, nil
}

// ProgramInfo describes one loaded program for people.
type ProgramInfo struct {
	Name         string `json:"name"`
	Hook         string `json:"hook"`
	ID           uint32 `json:"id"`
	Tag          string `json:"tag"`
	Instructions uint32 `json:"verified_instructions"` // processed by the verifier; 0 before 5.16
	Translated   int    `json:"instructions"`
	Jited        uint32 `json:"jited_bytes"`
	Memory       uint64 `json:"memory"` // bytes
}

// Programs describes the loaded programs, in the order of their slots, then
// those at the cgroup. current says that they are this binary's.
func (d *Datapath) Programs() (list []ProgramInfo, current bool, err error) {
	for slot, name := range programNames {
		var id uint32
		err := d.held(bpfgen.PodMapMstProgramsV1).Lookup(uint32(slot), &id)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return nil, false, fmt.Errorf("read the program table: %w", err)
		}
		info, err := describe(name, programHooks[slot], ebpf.ProgramID(id))
		if err != nil {
			return nil, false, err
		}
		list = append(list, info)
	}
	sock, err := d.sockPrograms()
	if err != nil {
		return nil, false, err
	}
	meta, err := d.GetMeta()
	return append(list, sock...), isBuild(meta.Build), err
}

func describe(name, hook string, id ebpf.ProgramID) (ProgramInfo, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ProgramInfo{}, fmt.Errorf("open program %s: %w", name, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ProgramInfo{}, fmt.Errorf("describe program %s: %w", name, err)
	}
	out := ProgramInfo{Name: name, Hook: hook, ID: uint32(id), Tag: info.Tag}
	out.Instructions, _ = info.VerifiedInstructions()
	out.Memory, _ = info.Memlock()
	out.Jited, _ = info.JitedSize()
	if n, err := info.TranslatedSize(); err == nil {
		out.Translated = n / 8
	}
	return out, nil
}
