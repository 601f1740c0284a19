/* Replaces the target's Python in a build container (images/build_tools.py): runs pip, Meson and Cython with a native
 * Python, through as_target.py, and everything else with the target's.
 *
 * It is compiled for the target and is not a script, because pip reads the header of sys.executable to determine which
 * wheels are compatible.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const scripts[] = {"meson", "meson.py", "cython", "cython3", "cython.py", "__pip-runner__.py", NULL};
static const char *const modules[] = {"pip", "cython", "mesonbuild.mesonmain", NULL};

static int isOneOf(const char *name, const char *const *names)
{
	while (*names && strcmp(name, *names))
		++names;
	return *names != NULL;
}

static int runsNatively(int argc, char **argv)
{
	/* A virtual environment's Python is called by another path. A build may have emptied the environment. */
	int ours = strchr(argv[0], '/') ? !strncmp(argv[0], "/usr/bin/python", 15) : !getenv("VIRTUAL_ENV");
	if (!ours || !getenv("PITORCH_MACHINE") || argc < 2)
		return 0;
	if (!strcmp(argv[1], "-m"))
		return argc > 2 && isOneOf(argv[2], modules);
	const char *slash = strrchr(argv[1], '/');
	return isOneOf(slash ? slash + 1 : argv[1], scripts);
}

int main(int argc, char **argv)
{
	if (argc > 0 && runsNatively(argc, argv)) {
		char **words = calloc((size_t)argc + 8, sizeof *words);
		int at = 0;
		if (words) {
			words[at++] = (char *)"/usr/libexec/pitorch/bin/python";
			words[at++] = (char *)"-S";
			words[at++] = (char *)"-X";
			words[at++] = (char *)"pycache_prefix=/var/tmp/pitorch-byte-code";
			words[at++] = (char *)"/usr/libexec/pitorch/as_target.py";
			words[at++] = strchr(argv[0], '/') ? argv[0] : (char *)"/usr/bin/python3";
			memcpy(words + at, argv + 1, (size_t)argc * sizeof *words);
			execv(words[0], words);
		}
	}
	execv("/usr/libexec/pitorch-target/python", argv);
	perror("/usr/libexec/pitorch-target/python");
	return 127;
}
