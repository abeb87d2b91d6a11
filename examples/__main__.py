"""`python -m farflock.examples` prints the paths of the programs, notebooks and manifests in the
package."""

from pathlib import Path

import farflock.experiments

programs = [*Path(__file__).parent.glob("[!_]*.py"), *Path(__file__).parent.glob("*.ipynb")]
manifests = Path(farflock.experiments.__file__).parent.glob("runs/*.toml")
print(*sorted(programs), *sorted(manifests), sep="\n")
