// SPDX-License-Identifier: Apache-2.0

package main

// mustang policy: NetworkPolicies without Kubernetes.

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/policy"
	"github.com/mustang-net/mustang/internal/policy/manifest"
	"github.com/mustang-net/mustang/internal/state"
)

func newPolicyCmd(g *globals) *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Aliases: []string{"netpol"}, Short: "NetworkPolicies without Kubernetes"}
	cmd.AddCommand(newPolicyApplyCmd(g), newPolicyLsCmd(g), newPolicyRmCmd(g))
	return cmd
}

func newPolicyApplyCmd(g *globals) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Add or replace the NetworkPolicies of a file",
		Long: `Add or replace the NetworkPolicies (networking.k8s.io/v1) of a file, YAML or JSON.
A Namespace (v1) in it gives that namespace its labels. All take effect, or none.

The pods are this node's endpoints: --namespace and --labels of ` + "`pod add`" + ` and
` + "`ep add`" + ` say what selectors see of them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := g.readPolicies(input(cmd), file)
			if err != nil {
				return err
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error {
				namespaces := make(map[string]map[string]string, len(f.Namespaces))
				for _, n := range f.Namespaces {
					namespaces[n.Name] = n.Labels
				}
				return e.ApplyPolicyFile(f.Policies, namespaces)
			})
		},
	}
	fileFlag(cmd, &file, "filename", "file with NetworkPolicies; - is standard input")
	cobra.CheckErr(cmd.MarkFlagRequired("filename"))
	return cmd
}

func (g *globals) readPolicies(stdin io.Reader, name string) (manifest.File, error) {
	text, err := g.readFile(name, stdin)
	if err != nil {
		return manifest.File{}, usageError{err}
	}
	file, err := manifest.Read(bytes.NewReader(text))
	if err != nil {
		return file, usagef("%s: %w", fileName(name), err)
	}
	return file, nil
}

func newPolicyRmCmd(g *globals) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "rm (-f FILE | NAMESPACE/NAME…)",
		Short: "Remove the NetworkPolicies of a file, or by name",
		RunE: func(cmd *cobra.Command, args []string) error {
			if (file == "") == (len(args) == 0) {
				return usagef("name what to remove by -f or by NAMESPACE/NAME")
			}
			keys, namespaces, err := g.policyNames(input(cmd), file, args)
			if err != nil {
				return err
			}
			return g.with(cmd.Context(), false, func(e *engine.Engine) error { return e.RemovePolicies(keys, namespaces) })
		},
	}
	fileFlag(cmd, &file, "filename", "file with the NetworkPolicies; - is standard input")
	return cmd
}

func (g *globals) policyNames(stdin io.Reader, file string, args []string) (keys []policy.Key, namespaces []string, err error) {
	if file != "" {
		f, err := g.readPolicies(stdin, file)
		for _, p := range f.Policies {
			keys = append(keys, p.Key)
		}
		for _, n := range f.Namespaces {
			namespaces = append(namespaces, n.Name)
		}
		return keys, namespaces, err
	}
	for _, arg := range args {
		namespace, name, ok := strings.Cut(arg, "/")
		if !ok {
			namespace, name = "default", arg
		}
		if key := (policy.Key{Namespace: namespace, Name: name}); !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys, nil, nil
}

// policyView is a policy as it is printed.
type policyView struct {
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Owner     string   `json:"owner"`
	Types     []string `json:"policy_types"`
	Ingress   int      `json:"ingress_rules"`
	Egress    int      `json:"egress_rules"`
	Endpoints []uint32 `json:"endpoints"`  // that it isolates on this node
	Missing   []string `json:"conditions"` // rules that are not wholly in force, and why
}

func newPolicyLsCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use:   "ls",
		Short: "List policies, the endpoints that they isolate, and rules that are not in force",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return g.with(cmd.Context(), true, func(e *engine.Engine) error {
				views, err := policyViews(e)
				if err != nil {
					return err
				}
				return g.print(cmd.OutOrStdout(), views, func(w io.Writer) { policyTable(w, views) })
			})
		},
	}
}

func policyViews(e *engine.Engine) ([]policyView, error) {
	m, err := e.Policies()
	views := []policyView{}
	if err != nil || m == nil {
		return views, err
	}
	isolated := map[policy.Key]map[uint32]bool{}
	endpoints, conditions := m.Endpoints(), m.Conditions()
	for _, id := range endpoints {
		for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
			keys, _ := m.Selecting(id, d)
			for _, k := range keys {
				if isolated[k] == nil {
					isolated[k] = map[uint32]bool{}
				}
				isolated[k][id] = true
			}
		}
	}
	for _, p := range m.Policies() {
		v := policyView{Namespace: p.Namespace, Name: p.Name, Owner: p.Owner.String(), Ingress: len(p.Ingress), Egress: len(p.Egress),
			Types: []string{}, Endpoints: []uint32{}, Missing: []string{}}
		if p.IsolatesIngress {
			v.Types = append(v.Types, "Ingress")
		}
		if p.IsolatesEgress {
			v.Types = append(v.Types, "Egress")
		}
		for _, id := range endpoints {
			if isolated[p.Key][id] {
				v.Endpoints = append(v.Endpoints, id)
			}
		}
		for _, c := range conditions {
			if c.Rule.Policy == p.Key {
				v.Missing = append(v.Missing, fmt.Sprintf("%s[%d] does not fit: %s", c.Rule.Direction, c.Rule.Index, c.Why()))
			}
		}
		views = append(views, v)
	}
	return views, nil
}

func policyTable(w io.Writer, views []policyView) {
	row(w, "NAMESPACE", "NAME", "OWNER", "TYPES", "INGRESS", "EGRESS", "ENDPOINTS", "IN-FORCE")
	for _, v := range views {
		force := "yes"
		if len(v.Missing) > 0 {
			force = strings.Join(v.Missing, "; ")
		}
		ids := make([]string, len(v.Endpoints))
		for i, id := range v.Endpoints {
			ids[i] = strconv.Itoa(int(id))
		}
		row(w, v.Namespace, v.Name, v.Owner, strings.Join(v.Types, ","), v.Ingress, v.Egress, strings.Join(ids, ","), force)
	}
}

// podLabelFlags are what `pod add` and `ep add` say about a pod beside its
// interface.
type podLabelFlags struct {
	namespace  string
	labels     map[string]string
	ports      []string
	masquerade bool
	exclude    []string
}

func (f *podLabelFlags) register(fl *pflag.FlagSet) {
	fl.StringVar(&f.namespace, "namespace", "default", "the pod's namespace, for policies")
	fl.StringToStringVar(&f.labels, "labels", nil, "the pod's labels, for policies: key=value,…")
	fl.StringSliceVar(&f.ports, "ports", nil, "the pod's ports by name, for policies: name=number[/protocol],…")
	fl.BoolVar(&f.masquerade, "masquerade", false, "towards the outside, the pod wears the node's address")
	fl.StringSliceVar(&f.exclude, "masquerade-exclude", nil, "networks that are not outside: those of pods")
}

// podSpec is what an endpoint's pod is.
type podSpec struct {
	ref         state.PodRef
	labels      map[string]string
	ports       []state.NamedPort
	servicePath state.ServicePath
	masquerade  *state.Masquerade
}

// spec is the pod called name; "" leaves it unnamed.
func (f *podLabelFlags) spec(name string) (podSpec, error) {
	if err := f.check(); err != nil {
		return podSpec{}, err
	}
	ports, err := f.namedPorts()
	if err != nil {
		return podSpec{}, err
	}
	m, err := f.masqueraded()
	return podSpec{ref: state.PodRef{Namespace: f.namespace, Name: name}, labels: f.labels, ports: ports, masquerade: m}, err
}

// check refuses names that no NetworkPolicy can have: it would never select the pod.
func (f *podLabelFlags) check() error {
	if wrong := validation.IsDNS1123Label(f.namespace); len(wrong) > 0 {
		return usagef("--namespace: %q is no namespace's name: %s", f.namespace, wrong[0])
	}
	for _, key := range slices.Sorted(maps.Keys(f.labels)) {
		if wrong := validation.IsQualifiedName(key); len(wrong) > 0 {
			return usagef("--labels: %q is no label's key: %s", key, wrong[0])
		}
		if wrong := validation.IsValidLabelValue(f.labels[key]); len(wrong) > 0 {
			return usagef("--labels: %q is no value for the label %s: %s", f.labels[key], key, wrong[0])
		}
	}
	return nil
}

func (f *podLabelFlags) masqueraded() (*state.Masquerade, error) {
	if !f.masquerade {
		if len(f.exclude) > 0 {
			return nil, usagef("--masquerade-exclude has no meaning without --masquerade: drop it, or give both")
		}
		return nil, nil
	}
	m := &state.Masquerade{}
	for _, text := range f.exclude {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() {
			return nil, usagef("masquerade-exclude %q is not a network: write one such as 10.0.0.0/8", text)
		}
		m.Inside = append(m.Inside, p.Masked())
	}
	return m, nil
}

func (f *podLabelFlags) namedPorts() ([]state.NamedPort, error) {
	var out []state.NamedPort
	for _, text := range f.ports {
		name, value, ok := strings.Cut(text, "=")
		number, protocol, _ := strings.Cut(value, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		p := state.NamedPort{Name: name, Protocol: state.TCP, Number: uint16(n)}
		if !ok || name == "" || err != nil || n == 0 {
			return nil, usagef("port %q is not name=number or name=number/protocol", text)
		}
		if wrong := validation.IsValidPortName(name); len(wrong) > 0 {
			return nil, usagef("port %q: %q is no port's name: %s", text, name, wrong[0])
		}
		if protocol != "" {
			if err := p.Protocol.UnmarshalText([]byte(strings.ToLower(protocol))); err != nil {
				return nil, usagef("port %q: %w", text, err)
			}
		}
		out = append(out, p)
	}
	return out, nil
}
