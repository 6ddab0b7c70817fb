// Command kube holds all programs of Kubernetes that the tests start. The name by which it is
// called selects the program. One link step instead of ten saves minutes and a gigabyte of build
// cache.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helm "helm.sh/helm/v4/pkg/cmd"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// servers run under k8s.io/component-base/cli, which sets their exit code.
var servers = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

// others have their own main function.
var others = map[string]func(){
	"etcd":    func() { etcdmain.Main(os.Args) },
	"coredns": runDNS,
	"kubectl": runKubectl,
	"helm":    runHelm,
	"certs":   func() { exitOn(writeCertificates(os.Args[1], os.Stdin)) },
}

func main() {
	name := filepath.Base(os.Args[0])
	if server, known := servers[name]; known {
		os.Exit(cli.Run(server()))
	}
	run, known := others[name]
	if !known {
		exitOn(fmt.Errorf("%s: this binary holds no such program", name))
	}
	run()
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runDNS serves with the plugins that are imported above, called in the order of this list.
func runDNS() {
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}

func runKubectl() {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
}

// runHelm prints no error, because helm has already printed it.
func runHelm() {
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	exitOn(err)
	if command.Execute() != nil {
		os.Exit(1)
	}
}
