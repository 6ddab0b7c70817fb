// Command pause holds the namespaces of a pod, or of a whole node: it buries the processes whose
// parents are gone, and does nothing else until it is told to end.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for what := range told {
		if what != syscall.SIGCHLD {
			return
		}
		for pid := 1; pid > 0; {
			// One signal may stand for several dead. An error means that no child is left.
			pid, _ = syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		}
	}
}
