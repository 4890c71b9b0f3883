"""Build the compiled kernel into the environment of the running Python."""

import sys

from worker.cpu_kernel import KernelBuildError, KernelUnavailableError, build, library

try:
    path = build()
    library()
except KernelBuildError as error:
    sys.exit(str(error))
except KernelUnavailableError as error:
    sys.stdout.write(f"built {path}, of no use on this machine: {error}\n")
else:
    sys.stdout.write(f"built {path}\n")
