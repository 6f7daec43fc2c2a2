/*-------------------------------------------------------------------------
 *
 * reports.c
 *	  Has UndefinedBehaviorSanitizer write its reports to files.
 *
 * With gcc's libraries it does not by itself, whatever log_path says, where
 * AddressSanitizer is as well: both have a function that sets the path, and both
 * call the same one, AddressSanitizer's.  The other would write to stderr, where a
 * test that passes says nothing of it.  This library is preloaded, and calls the
 * right one: REPORTS is the path.
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
