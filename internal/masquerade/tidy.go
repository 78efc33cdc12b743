// SPDX-License-Identifier: Apache-2.0

package masquerade

// Groups go with their last pods, the hook and the table with the last group.
// The plugin and the engine make groups, and each removes its own.

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/mustang-net/mustang/internal/nft"
)

// Locked runs fn while no other process of the scope is in Locked: what one finds
// unused must not be what another is about to use. stateDir is the scope's.
func Locked(stateDir string, fn func() error) error {
	err := os.MkdirAll(stateDir, 0o700)
	if err != nil {
		return fmt.Errorf("make the state directory: %w", err)
	}
	dir, err := os.Open(stateDir)
	if err != nil {
		return fmt.Errorf("lock the scope's nftables table: %w", err)
	}
	defer dir.Close() // and with it the lock
	for {
		if err = unix.Flock(int(dir.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("lock the scope's nftables table by %s: %w", stateDir, err)
	}
	return fn()
}

// Keep removes the plugin's groups that are not in used. Those in it may be still
// to come: somebody counts on the hook.
func (t Table) Keep(used []string) error {
	return t.tidy(len(used) > 0, func(group string) bool {
		return strings.HasPrefix(group, podPrefix) || slices.Contains(used, group)
	})
}

// Drop removes a group. wanted: pods of others are masqueraded, whose groups may be
// still to come.
func (t Table) Drop(group string, wanted bool) error {
	return t.tidy(wanted, func(other string) bool { return other != group })
}

// content is what a table has.
type content struct {
	stay, gone []string // chains of groups
	other      bool     // one that stays and is hooked itself, as earlier versions made them, or is a stranger's
	hooked     bool
	inside     bool // somebody has said what is
}

// tidy removes the groups that stays does not want. When none is left, and none is
// wanted, packets pass the table no more, and it goes unless it knows what is inside.
// A kernel without nftables has none.
func (t Table) tidy(wanted bool, stays func(group string) bool) error {
	c, err := nft.Connect()
	if err != nil {
		return err
	}
	has, found, err := t.look(c, stays)
	if err != nil || !found {
		return err
	}
	last := !wanted && !has.other && len(has.stay) == 0
	switch {
	case last && !has.inside:
		c.DelTable(t.nft())
	case last && has.hooked:
		t.unhook(c)
		fallthrough
	default:
		t.removeGroups(c, has)
	}
	if err := c.Flush(); err != nil && !nft.Absent(err) {
		return fmt.Errorf("tidy nftables table %s: %w", t.Name, err)
	}
	return nil
}

// look reads the table; false: there is none.
func (t Table) look(c *nftables.Conn, stays func(group string) bool) (has content, found bool, err error) {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		if nft.Unsupported(err) {
			return has, false, nil
		}
		return has, false, fmt.Errorf("list nftables chains: %w", err)
	}
	for _, chain := range chains {
		if chain.Table.Name != t.Name {
			continue
		}
		found = true
		group, ours := strings.CutPrefix(chain.Name, chainPrefix)
		earlier, isEarlier := strings.CutPrefix(chain.Name, hookedGroup)
		switch {
		case chain.Name == HookChain:
			has.hooked = true
		case chain.Name == insideChain:
			rules, err := c.GetRules(t.nft(), chain)
			if err != nil {
				return has, false, fmt.Errorf("list what is inside for nftables table %s: %w", t.Name, err)
			}
			has.inside = len(rules) > 0
		case slices.Contains([]string{groupsChain, wornChain}, chain.Name):
		case ours && !stays(group), isEarlier && !stays(earlier):
			has.gone = append(has.gone, chain.Name)
		case ours:
			has.stay = append(has.stay, chain.Name)
		default:
			has.other = true
		}
	}
	return has, found, nil
}

// Hollow says that somebody has taken the rules out of the table, as `nft flush table` does,
// which leaves chains and sets.
func (t Table) Hollow() (bool, error) {
	c, err := nft.Connect()
	if err != nil {
		return false, err
	}
	has, found, err := t.look(c, func(string) bool { return true })
	if err != nil || !found {
		return false, err
	}
	chains := has.stay
	if len(has.stay) > 0 {
		chains = append(chains, groupsChain)
	}
	if has.hooked {
		chains = append(chains, HookChain, wornChain)
	}
	for _, name := range chains {
		rules, err := c.GetRules(t.nft(), &nftables.Chain{Name: name, Table: t.nft()})
		if err != nil {
			if nft.Absent(err) {
				continue // it goes at this moment
			}
			return false, fmt.Errorf("list the rules of chain %s of nftables table %s: %w", name, t.Name, err)
		}
		if len(rules) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// removeGroups adds to the transaction that groups go, and nothing leads there.
func (t Table) removeGroups(c *nftables.Conn, has content) {
	if len(has.gone) == 0 {
		return
	}
	groups := c.AddChain(&nftables.Chain{Name: groupsChain, Table: t.nft()})
	c.FlushChain(groups)
	for _, name := range has.stay {
		c.AddRule(&nftables.Rule{Table: t.nft(), Chain: groups, Exprs: jump(name)})
	}
	for _, name := range has.gone {
		chain := &nftables.Chain{Name: name, Table: t.nft()}
		c.FlushChain(chain)
		c.DelChain(chain)
		_, group, _ := strings.Cut(name, "-")
		for _, v4 := range []bool{true, false} {
			c.DelSet(t.set(group, v4))
		}
	}
}
