/*-------------------------------------------------------------------------
 *
 * reports.c
 *	  Makes UndefinedBehaviorSanitizer write its reports to files.
 *
 * With gcc's libraries, log_path has no effect on UndefinedBehaviorSanitizer if
 * AddressSanitizer is present. Both libraries have a function that sets the path, and
 * both call the same one, AddressSanitizer's. The other one would write to stderr,
 * which a passing test does not show. This library is preloaded, and calls the right
 * function: REPORTS is the path.
 *
 *-------------------------------------------------------------------------
 */
#include <dlfcn.h>
#include <stdlib.h>

static void __attribute__((constructor)) set_path(void)
{
	void *library = dlopen("libubsan.so.1", RTLD_LAZY | RTLD_NOLOAD);
	void (*set)(const char *) = NULL;

	if (library != NULL)
		set = (void (*)(const char *)) dlsym(library, "__sanitizer_set_report_path");
	if (set != NULL && getenv("REPORTS") != NULL)
		set(getenv("REPORTS"));
}
