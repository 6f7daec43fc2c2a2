/*-------------------------------------------------------------------------
 *
 * server.c
 *	  Checks of the server after all clients have ended.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <string.h>

#include "server.h"
#include "tally.h"

/*
 * Expect reports a result other than the expected one.
 */
void
Expect(Session *session, const char *what, const char *expected, const char *sql)
{
	if (Ask(session, NULL, "%s", sql) && strcmp(Value(session, 0, 0), expected) != 0)
		Violation("[server] %s: %s, not %s", what, Value(session, 0, 0), expected);
}

/*
 * CheckIndexes checks that the indexes of the store are valid, as far as the server can
 * check.
 */
void
CheckIndexes(Session *session)
{
	if (!Ask(session, NULL, "SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'") ||
		PQntuples(session->result) == 0)
	{
		printf("  indexes not checked: the server has no amcheck\n");
		return;
	}
	if (Ask(session, NULL, "CREATE EXTENSION IF NOT EXISTS amcheck") &&
		Ask(session, NULL,
			"SELECT bt_index_parent_check(indexrelid, true, true) FROM pg_index "
			"WHERE indrelid = 'idempotency.key'::regclass AND indisvalid"))
		printf("  indexes checked: %d\n", PQntuples(session->result));
}
