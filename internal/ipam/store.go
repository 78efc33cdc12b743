// SPDX-License-Identifier: Apache-2.0

package ipam

// Allocations are symbolic links: the name is the address, the target its
// owner. One system call makes one, with its content, or says that somebody
// has it; so a process killed at any instant leaves an allocation or none,
// and `ls -l` shows who has what.

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrExhausted is a pool without a free address.
var ErrExhausted = errors.New("no address is free")

// ErrTaken is an address that was asked for by name and is somebody else's.
var ErrTaken = errors.New("the address is taken")

const (
	cursorPrefix = "last-"   // + the subnet: the address given out last
	lookedPrefix = "looked-" // + the subnet: it is known who else has addresses of it
)

// Store is a directory of allocations.
type Store struct{ dir string }

// At is the store in dir, which need not exist yet.
func At(dir string) Store { return Store{dir} }

// Allocation is an address given to an owner.
type Allocation struct {
	Prefix  netip.Prefix `json:"prefix"` // the address, with the length of its pool's subnet
	Gateway netip.Addr   `json:"gateway,omitzero"`
}

// Allocate gives owner one address of each family that pools have: those in
// want, or else the next free ones. Freed addresses rest until their pool has
// come around. When it fails, owner has got nothing.
//
// others says who has addresses that he did not get here; nil: nobody. It is asked before a
// pool gives its first, and after LookAgain, and these are reserved in one with what is given.
func (s Store) Allocate(owner string, pools []Pool, want []netip.Addr, others func() (map[netip.Addr]string, error)) (out []Allocation, err error) {
	err = s.locked(func() (err error) {
		if err := s.admit(pools, others); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, s.drop(owner, out))
				out = nil
			}
		}()
		if out, err = s.named(owner, pools, want); err != nil {
			return err
		}
		for _, v4 := range []bool{true, false} {
			if slices.ContainsFunc(want, func(a netip.Addr) bool { return a.Is4() == v4 }) {
				continue
			}
			a, ok, err := s.anyOf(owner, pools, v4)
			if ok { // also when it could not be remembered as the last
				out = append(out, a)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// admit reserves, with the lock held, what others have of pools that they were not asked for.
func (s Store) admit(pools []Pool, others func() (map[netip.Addr]string, error)) error {
	fresh := slices.DeleteFunc(slices.Clone(pools), func(p Pool) bool {
		_, err := os.Lstat(s.fileOf(lookedPrefix, p))
		return err == nil
	})
	if len(fresh) == 0 || others == nil {
		return nil
	}
	all, err := others()
	if err != nil {
		return err
	}
	for a, owner := range all {
		if slices.ContainsFunc(fresh, func(p Pool) bool { return p.Subnet.Contains(a) }) {
			if _, err := s.take(owner, a); err != nil {
				return err
			}
		}
	}
	for _, p := range fresh {
		if err := replaceLink("others", s.fileOf(lookedPrefix, p)); err != nil {
			return err
		}
	}
	return nil
}

// LookAgain has the next Allocate ask others again, and what is reserved for them, which is by
// owners that reserved chooses, is free until then: others may have come and gone since.
func (s Store) LookAgain(reserved func(owner string) bool) error {
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil // nobody has looked
	}
	return s.locked(func() error {
		looked, err := filepath.Glob(filepath.Join(s.dir, lookedPrefix+"*"))
		for _, path := range looked {
			err = errors.Join(err, os.Remove(path))
		}
		if err != nil {
			return fmt.Errorf("look again who has addresses: %w", err)
		}
		_, err = s.release(reserved)
		return err
	})
}

func (s Store) named(owner string, pools []Pool, want []netip.Addr) (out []Allocation, err error) {
	for _, a := range want {
		i := -1
		for j, p := range pools {
			if p.Subnet.Contains(a) && p.allowed(a) {
				i = j
			}
		}
		if i < 0 {
			return out, fmt.Errorf("address %s is in none of the pools, or is a gateway, excluded, or outside start..end", a)
		}
		ok, err := s.take(owner, a)
		if err != nil {
			return out, err
		}
		if !ok {
			return out, fmt.Errorf("%s: %w by %s", a, ErrTaken, s.Owner(a))
		}
		out = append(out, Allocation{pools[i].prefix(a), pools[i].Gateway})
	}
	return out, nil
}

// anyOf takes from the first pool of the family that has something left;
// false: there is no pool of that family.
func (s Store) anyOf(owner string, pools []Pool, v4 bool) (Allocation, bool, error) {
	var tried []string
	for _, p := range pools {
		if p.Subnet.Addr().Is4() != v4 {
			continue
		}
		tried = append(tried, p.Subnet.String())
		a, ok, err := s.fromPool(owner, p)
		if err != nil || ok {
			return Allocation{p.prefix(a), p.Gateway}, ok, err
		}
	}
	if len(tried) == 0 {
		return Allocation{}, false, nil
	}
	return Allocation{}, false, fmt.Errorf("%w in %s", ErrExhausted, strings.Join(tried, ", "))
}

func (s Store) fromPool(owner string, p Pool) (netip.Addr, bool, error) {
	cursor := s.fileOf(cursorPrefix, p)
	var last netip.Addr
	if text, err := os.Readlink(cursor); err == nil {
		last, _ = netip.ParseAddr(text) // a damaged cursor only starts anew
	}
	for a := range p.after(last) {
		ok, err := s.take(owner, a)
		if err != nil {
			return a, false, err
		}
		if ok {
			return a, true, replaceLink(a.String(), cursor)
		}
	}
	return last, false, nil
}

func (s Store) fileOf(prefix string, p Pool) string {
	return filepath.Join(s.dir, prefix+strings.ReplaceAll(p.Subnet.String(), "/", "_"))
}

func (s Store) file(a netip.Addr) string { return filepath.Join(s.dir, a.String()) }

// take is false when somebody, owner included, has the address.
func (s Store) take(owner string, a netip.Addr) (bool, error) {
	err := os.Symlink(owner, s.file(a))
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("allocate %s: %w", a, err)
	}
	return true, nil
}

func replaceLink(target, path string) error {
	beside := path + "-new"
	if err := os.Remove(beside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, beside); err != nil {
		return fmt.Errorf("remember where the pool stands: %w", err)
	}
	return os.Rename(beside, path)
}

func (s Store) drop(owner string, list []Allocation) error {
	var errs []error
	for _, a := range list {
		if holder, err := os.Readlink(s.file(a.Prefix.Addr())); err == nil && holder == owner {
			errs = append(errs, os.Remove(s.file(a.Prefix.Addr())))
		}
	}
	return errors.Join(errs...)
}

// Release frees everything that owner has; nothing is success.
func (s Store) Release(owner string) error {
	_, err := s.ReleaseWhere(func(o string) bool { return o == owner })
	return err
}

// ReleaseWhere frees the addresses of the owners that gone chooses. Nobody takes one
// between the look at whose it is and its end.
func (s Store) ReleaseWhere(gone func(owner string) bool) (freed []netip.Addr, err error) {
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil // nobody has anything, and none is made for that
	}
	err = s.locked(func() error {
		freed, err = s.release(gone)
		return err
	})
	return freed, err
}

// release is ReleaseWhere with the lock held.
func (s Store) release(gone func(owner string) bool) (freed []netip.Addr, err error) {
	all, err := s.Owners()
	for a, owner := range all {
		if !gone(owner) {
			continue
		}
		if failed := os.Remove(s.file(a)); failed != nil && !errors.Is(failed, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("release %s: %w", a, failed))
			continue
		}
		freed = append(freed, a)
	}
	return freed, err
}

// Owner is who has the address; "": nobody.
func (s Store) Owner(a netip.Addr) string {
	owner, _ := os.Readlink(s.file(a))
	return owner
}

// Owners are the allocations: who has which address.
func (s Store) Owners() (map[netip.Addr]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list allocations: %w", err)
	}
	out := make(map[netip.Addr]string, len(entries))
	for _, e := range entries {
		a, err := netip.ParseAddr(e.Name())
		if err != nil {
			continue
		}
		if owner, err := os.Readlink(s.file(a)); err == nil {
			out[a] = owner
		}
	}
	return out, nil
}

// Room says whether pools could serve one more pod; the error names the family
// that could not.
func (s Store) Room(pools []Pool) error {
	taken, err := s.Owners()
	if err != nil {
		return err
	}
	for _, v4 := range []bool{true, false} {
		var full []string
		room := false
		for _, p := range pools {
			if p.Subnet.Addr().Is4() == v4 && !room {
				room = p.room(taken)
				full = append(full, p.Subnet.String())
			}
		}
		if !room && len(full) > 0 {
			return fmt.Errorf("%w in %s", ErrExhausted, strings.Join(full, ", "))
		}
	}
	return nil
}

func (p Pool) room(taken map[netip.Addr]string) bool {
	for a := range p.after(netip.Addr{}) {
		if _, used := taken[a]; !used {
			return true
		}
	}
	return false
}

// locked keeps two processes from moving one cursor. Nobody else may open the
// directory: who can could lock it, and hold up all for good.
func (s Store) locked(fn func() error) error {
	err := os.MkdirAll(s.dir, 0o700)
	if err == nil {
		err = os.Chmod(s.dir, 0o700) // earlier versions let everybody in
	}
	if err != nil {
		return fmt.Errorf("make the directory of allocations: %w", err)
	}
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("open the directory of allocations: %w", err)
	}
	defer d.Close() // and with it the lock
	for {
		if err = unix.Flock(int(d.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", s.dir, err)
	}
	return fn()
}
