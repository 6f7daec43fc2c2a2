/*
 * libpq, from C. Every argument is text, as PQexecParams() takes it; the server infers
 * the types. test/clients/play describes requests and replies.
 */
#define _GNU_SOURCE /* asprintf */

#include <jansson.h>
#include <libpq-fe.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ARGUMENTS 10
#define MAX_SESSIONS 8

/* One connection, named by session, host and mode. */
typedef struct Session
{
	char name[200];
	PGconn *connection;
	bool prepared;
	int statements;
} Session;

static Session sessions[MAX_SESSIONS];

/* FindSession returns the session of a request, which connects with the first request. */
static Session *
FindSession(json_t *request)
{
	const char *host = json_string_value(json_object_get(request, "host"));
	bool prepared = json_is_true(json_object_get(request, "prepared"));
	char name[200];
	const char *keywords[] = {"host", NULL};
	const char *values[] = {host, NULL};
	int i = 0;

	snprintf(name, sizeof(name), "%s %s %d", json_string_value(json_object_get(request, "session")), host, prepared);
	while (sessions[i].connection != NULL && strcmp(sessions[i].name, name) != 0)
		i++;
	if (sessions[i].connection == NULL)
	{
		strcpy(sessions[i].name, name);
		sessions[i].prepared = prepared;
		sessions[i].connection = PQconnectdbParams(keywords, values, 0);
	}
	return &sessions[i];
}

/* ArrayText returns an array as the text that PostgreSQL reads, since libpq has no arrays. */
static char *
ArrayText(json_t *values)
{
	char *text = strdup("{");
	json_t *value;
	size_t i;

	json_array_foreach(values, i, value)
	{
		/* JSON escapes quotes and backslashes as the text of an array does. */
		char *element = json_dumps(value, JSON_ENCODE_ANY);
		char *before = text;

		asprintf(&text, "%s%s%s", before, i > 0 ? "," : "", element);
		free(element);
		free(before);
	}
	return strcat(realloc(text, strlen(text) + 2), "}");
}

/* Native returns an argument as text, or NULL. A parsed object or array has no text. */
static char *
Native(const char *kind, json_t *value)
{
	char *text;
	char *result = NULL;

	if (json_is_null(value) || (strcmp(kind, "value") == 0 && (json_is_object(value) || json_is_array(value))))
		return NULL;
	if (strcmp(kind, "value") != 0 && strcmp(kind, "wrapped") != 0 && json_is_array(value))
		return ArrayText(value);
	if (strcmp(kind, "wrapped") != 0 && json_is_string(value))
		text = strdup(json_string_value(value));
	else
		text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
	if (strcmp(kind, "interval") == 0)
		asprintf(&result, "%s seconds", text);
	else if (strcmp(kind, "bytes") == 0)
		asprintf(&result, "\\x%s", text);
	else
		return text;
	free(text);
	return result;
}

/* Query runs a statement with its arguments, prepared or not. */
static PGresult *
Query(Session *session, json_t *request)
{
	const char *sql = json_string_value(json_object_get(request, "sql"));
	char *values[MAX_ARGUMENTS];
	json_t *argument;
	size_t count;
	char name[20];
	PGresult *result;

	json_array_foreach(json_object_get(request, "arguments"), count, argument)
		values[count] = Native(json_string_value(json_array_get(argument, 0)), json_array_get(argument, 1));
	if (session->prepared)
	{
		snprintf(name, sizeof(name), "s%d", session->statements++);
		PQclear(PQprepare(session->connection, name, sql, 0, NULL));
		result = PQexecPrepared(session->connection, name, count, (const char **) values, NULL, NULL, 0);
	}
	else
		result = PQexecParams(session->connection, sql, count, NULL, (const char **) values, NULL, NULL, 0);
	while (count > 0)
		free(values[--count]);
	return result;
}

/* Rows returns the rows of a result; with parse, each is the first column, parsed. */
static json_t *
Rows(PGresult *result, bool parse)
{
	json_t *rows = json_array();

	for (int row = 0; row < PQntuples(result); row++)
	{
		json_t *values = json_array();

		if (parse)
		{
			json_array_append_new(rows, json_loads(PQgetvalue(result, row, 0), 0, NULL));
			continue;
		}
		for (int column = 0; column < PQnfields(result); column++)
			json_array_append_new(values, PQgetisnull(result, row, column) ? json_null() :
								  json_string(PQgetvalue(result, row, column)));
		json_array_append_new(rows, values);
	}
	return rows;
}

/* Answer does what a request says, and returns the reply. */
static json_t *
Answer(json_t *request)
{
	Session *session = FindSession(request);
	const char *action = json_string_value(json_object_get(request, "do"));
	PGresult *result;
	json_t *reply;

	if (strncmp(action, "query", 5) == 0)
		result = Query(session, request);
	else
	{
		/* The savepoint is called s; the other requests are commands as they stand. */
		char *command;

		asprintf(&command, strstr(action, "savepoint") ? "%s s" : "%s", action);
		result = PQexec(session->connection, command);
		free(command);
	}
	if (PQresultStatus(result) == PGRES_TUPLES_OK || PQresultStatus(result) == PGRES_COMMAND_OK)
		reply = json_pack("{s:o}", "rows", Rows(result, strcmp(action, "query json") == 0));
	else
	{
		const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);

		reply = json_pack("{s:s, s:s}", "error", state ? state : "", "message", PQerrorMessage(session->connection));
	}
	PQclear(result);
	return reply;
}

int
main(void)
{
	json_t *request;

	while ((request = json_loadf(stdin, JSON_DISABLE_EOF_CHECK, NULL)) != NULL)
	{
		json_t *reply = Answer(request);

		json_dumpf(reply, stdout, 0);
		puts("");
		fflush(stdout);
		json_decref(reply);
		json_decref(request);
	}
	return 0;
}
