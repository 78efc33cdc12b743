// SPDX-License-Identifier: Apache-2.0

// Package k8s watches Kubernetes and says what it wants in the terms of
// internal/state. It is the only importer of client-go besides bench/cluster.
//
// It keeps no API objects: what arrives is turned into small structs, one
// object at a time. Kinds that nobody asked for are neither
// watched nor registered.
package k8s

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Access says where the API server is and who asks. The zero value is a pod's:
// its service account, and the address in its environment.
type Access struct {
	// Kubeconfig is a file; "" is the pod's service account.
	Kubeconfig string
	// Server is the API server's address, HOST:PORT or a URL, in place of the one
	// that Kubeconfig or the environment names. An agent that makes Services work
	// cannot ask a Service for the way.
	Server string
}

// Where a pod finds its service account.
const (
	accountToken = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	accountCA    = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
)

// Client talks to one API server.
type Client struct {
	core, discovery, networking rest.Interface
	// Server is the address in use, for people.
	Server string
}

// Connect reads the credentials. It does not talk to the API server yet, which
// may be away.
func Connect(a Access) (*Client, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	// A handful of watches and lists: a client-side limit would only delay them.
	config.QPS = -1
	config.UserAgent = "mustang-agent"
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	codecs := serializer.NewCodecFactory(scheme)
	config.NegotiatedSerializer = codecs.WithoutConversion()
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("prepare the connection to the API server %s: %w", config.Host, err)
	}
	group := func(gv schema.GroupVersion, path string) rest.Interface {
		c := rest.CopyConfig(config)
		c.GroupVersion, c.APIPath = &gv, path
		client, e := rest.RESTClientForConfigAndClient(c, shared)
		err = errors.Join(err, e)
		return client
	}
	c := &Client{
		core:       group(corev1.SchemeGroupVersion, "/api"),
		discovery:  group(discoveryv1.SchemeGroupVersion, "/apis"),
		networking: group(networkingv1.SchemeGroupVersion, "/apis"),
		Server:     config.Host,
	}
	if err != nil {
		return nil, fmt.Errorf("prepare the connection to the API server %s: %w", config.Host, err)
	}
	return c, nil
}

// newScheme knows the kinds that we use, and no other.
func newScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion,
		&corev1.Service{}, &corev1.ServiceList{}, &corev1.Node{}, &corev1.NodeList{}, &corev1.Event{},
		&corev1.Pod{}, &corev1.PodList{}, &corev1.Namespace{}, &corev1.NamespaceList{}, &metav1.Status{})
	s.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	s.AddKnownTypes(networkingv1.SchemeGroupVersion, &networkingv1.NetworkPolicy{}, &networkingv1.NetworkPolicyList{})
	for _, gv := range []schema.GroupVersion{corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion, networkingv1.SchemeGroupVersion} {
		metav1.AddToGroupVersion(s, gv)
	}
	return s, nil
}

func (a Access) config() (*rest.Config, error) {
	server, err := serverURL(a.Server)
	if err != nil {
		return nil, err
	}
	if a.Kubeconfig != "" {
		rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: a.Kubeconfig}
		var overrides clientcmd.ConfigOverrides
		overrides.ClusterInfo.Server = server
		config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &overrides).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %s: %w", a.Kubeconfig, err)
		}
		return config, nil
	}
	return podConfig(server)
}

// podConfig uses the pod's service account. The token's file is read again by
// client-go, since Kubernetes replaces it every hour.
func podConfig(server string) (*rest.Config, error) {
	if server == "" {
		host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, errors.New("no API server is named, and this process is no pod of a cluster; give kubeconfig, or run as a pod and give api-server")
		}
		server = "https://" + net.JoinHostPort(host, port)
	}
	token, err := os.ReadFile(accountToken)
	if err != nil {
		return nil, fmt.Errorf("read the pod's service account: %w; outside a pod, give kubeconfig", err)
	}
	return &rest.Config{
		Host: server, BearerToken: strings.TrimSpace(string(token)), BearerTokenFile: accountToken,
		TLSClientConfig: rest.TLSClientConfig{CAFile: accountCA},
	}, nil
}

// CheckServer says what is wrong with the address of an API server that a user gives.
func CheckServer(s string) error {
	_, err := serverURL(s)
	return err
}

// serverURL reads HOST:PORT, HOST or a URL.
func serverURL(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	text := s
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", fmt.Errorf("api-server %q is neither HOST:PORT nor a URL; write it like 10.0.0.1:6443 or https://api.example:6443", s)
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}
