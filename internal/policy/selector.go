// SPDX-License-Identifier: Apache-2.0

package policy

import "slices"

// Operator is a label selector's.
type Operator string

const (
	In           Operator = "In"
	NotIn        Operator = "NotIn"
	Exists       Operator = "Exists"
	DoesNotExist Operator = "DoesNotExist"
)

// Requirement is one condition on one label.
type Requirement struct {
	Key      string
	Operator Operator
	Values   []string `json:",omitempty"`
}

// Selector is a label selector: all its requirements must hold. An empty one
// selects everything.
type Selector []Requirement

// Matches says whether s selects an object with these labels.
func (s Selector) Matches(labels map[string]string) bool {
	for _, r := range s {
		if !r.holds(labels) {
			return false
		}
	}
	return true
}

func (r Requirement) holds(labels map[string]string) bool {
	value, has := labels[r.Key]
	switch r.Operator {
	case In:
		return has && slices.Contains(r.Values, value)
	case NotIn: // also what does not have the label
		return !has || !slices.Contains(r.Values, value)
	case Exists:
		return has
	case DoesNotExist:
		return !has
	}
	return false
}

// canonical is one string for all selectors that say the same in another order.
func (s Selector) canonical() string {
	parts := make([]string, len(s))
	for i, r := range s {
		values := slices.Sorted(slices.Values(r.Values))
		parts[i] = join(append([]string{r.Key, string(r.Operator)}, values...)...)
	}
	slices.Sort(parts)
	return join(parts...)
}
