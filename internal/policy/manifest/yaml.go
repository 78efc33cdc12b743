// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/mustang-net/mustang/internal/policy"
)

// Namespace is a namespace's labels.
type Namespace struct {
	Name   string
	Labels map[string]string
}

// File is what a file says.
type File struct {
	Policies   []policy.Policy
	Namespaces []Namespace
}

// Read reads YAML or JSON documents: NetworkPolicies, Namespaces, and lists of
// them. Everything must be right, or nothing is answered.
func Read(r io.Reader) (File, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return File{}, err
	}
	var f File
	lines := 0 // of the documents before
	for i, doc := range Documents(text) {
		if !saysNothing(doc) {
			if err := f.add(doc, lines); err != nil {
				return File{}, fmt.Errorf("document %d: %w", i+1, err)
			}
		}
		lines += bytes.Count(doc, []byte("\n"))
	}
	if err := f.check(); err != nil {
		return File{}, err
	}
	return f, nil
}

// One is the only document of a stream, beside those that say nothing: the reader of YAML
// takes the first alone, be it nothing but comments. Without any it is nil.
func One(text []byte) ([]byte, error) {
	docs := slices.DeleteFunc(Documents(text), saysNothing)
	switch len(docs) {
	case 0:
		return nil, nil
	case 1:
		return docs[0], nil
	}
	return nil, fmt.Errorf("it has %d documents", len(docs))
}

// saysNothing is true of a document that is empty, or comments alone.
func saysNothing(doc []byte) bool {
	var v any
	return yaml.Unmarshal(doc, &v) == nil && v == nil
}

// Documents cuts a stream at its `---` lines. What follows there is the next one's.
func Documents(text []byte) [][]byte {
	var out [][]byte
	var doc bytes.Buffer
	lines := bufio.NewReader(bytes.NewReader(text))
	for {
		line, err := lines.ReadBytes('\n')
		if bytes.HasPrefix(line, []byte("---")) && (len(line) == 3 || bytes.ContainsRune([]byte(" \t\r\n"), rune(line[3]))) {
			out = append(out, bytes.Clone(doc.Bytes()))
			doc.Reset()
			line = line[3:]
		}
		doc.Write(line)
		if err != nil {
			return append(out, doc.Bytes())
		}
	}
}

type list struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ListMeta `json:"metadata"`
	Items           []yamlItem      `json:"items"`
}

// yamlItem is an object that is read when its kind is known.
type yamlItem []byte

func (y *yamlItem) UnmarshalJSON(b []byte) error {
	*y = bytes.Clone(b)
	return nil
}

// policyObject may have the status that clusters once wrote: nobody reads it.
type policyObject struct {
	networkingv1.NetworkPolicy `json:",inline"`
	Status                     map[string]any `json:"status"`
}

type namespaceObject struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              map[string]any `json:"spec"`
	Status            map[string]any `json:"status"`
}

// add reads a document, or an item of a list. Before it the file has so many lines.
func (f *File) add(doc []byte, before int) error {
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(doc, &kind); err != nil {
		return unreadable("object", doc, before, err)
	}
	switch {
	case kind.APIVersion == "networking.k8s.io/v1" && kind.Kind == "NetworkPolicy":
		var p policyObject
		if err := decode(kind.Kind, doc, before, &p); err != nil {
			return err
		}
		made, err := Policy(&p.NetworkPolicy)
		f.Policies = append(f.Policies, made)
		return err
	case kind.APIVersion == "v1" && kind.Kind == "Namespace":
		var n namespaceObject
		if err := decode(kind.Kind, doc, before, &n); err != nil {
			return err
		}
		if err := n.wrong(); err != nil {
			return fmt.Errorf("Namespace: %w", err)
		}
		f.Namespaces = append(f.Namespaces, Namespace{n.Name, n.Labels})
		return nil
	case kind.APIVersion == "v1" && kind.Kind == "List", kind.APIVersion == "networking.k8s.io/v1" && kind.Kind == "NetworkPolicyList":
		var l list
		if err := decode(kind.Kind, doc, before, &l); err != nil {
			return err
		}
		for i, item := range l.Items {
			if err := f.add(item, before); err != nil {
				return fmt.Errorf("item %d: %w", i, err)
			}
		}
		return nil
	}
	return fmt.Errorf("apiVersion %q, kind %q is neither a NetworkPolicy of networking.k8s.io/v1 nor a Namespace of v1", kind.APIVersion, kind.Kind)
}

func (f *File) check() error {
	policies, namespaces := map[policy.Key]bool{}, map[string]bool{}
	for _, p := range f.Policies {
		if policies[p.Key] {
			return fmt.Errorf("NetworkPolicy %s is in the file twice; remove one", p.Key)
		}
		policies[p.Key] = true
	}
	for _, n := range f.Namespaces {
		if namespaces[n.Name] {
			return fmt.Errorf("Namespace %s is in the file twice; remove one", n.Name)
		}
		namespaces[n.Name] = true
	}
	if len(f.Policies)+len(f.Namespaces) == 0 {
		return errors.New("the file has no NetworkPolicy")
	}
	return nil
}
