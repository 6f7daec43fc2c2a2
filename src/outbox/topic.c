/*-------------------------------------------------------------------------
 *
 * outbox/topic.c
 *	  Sets of topics, and of those that patterns match, as bits.
 *
 * Shared memory has such sets for the consumers that wait (wakeup.c).  If a pattern matches
 * a topic, the sets of the two have a bit in common.  They can also have one in common where
 * it does not match, which costs a read that finds nothing.
 *
 * A topic has a bit for itself, one for each prefix that ends in a punctuation mark,
 * such as "order." of "order.placed", and the bit EVERYTHING.  A pattern has one bit:
 * without "*", that of the topic that it matches; otherwise that of the longest such
 * prefix before its first "*", or EVERYTHING if there is none.
 *
 * Takes no locks, reads no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"

#include "base/compat.h"
#include "outbox/outbox.h"

/* The bit that all topics have. */
#define EVERYTHING 0

/* FNV-1a, whose value is known for every prefix on the way. */
#define HASH_BASIS UINT64CONST(14695981039346656037)
#define HASH_FACTOR UINT64CONST(1099511628211)

static uint64
HashByte(uint64 hash, char byte)
{
	return (hash ^ (unsigned char) byte) * HASH_FACTOR;
}

static void
SetBit(TopicSet *set, uint32 bit)
{
	set->words[bit / 64] |= UINT64CONST(1) << (bit % 64);
}

/*
 * BitOf returns the bit of a hashed topic or prefix.  It is never EVERYTHING.
 */
static uint32
BitOf(uint64 hash, bool isTopic)
{
	hash = HashByte(hash, isTopic ? 't' : 'b');
	return 1 + (uint32) ((hash ^ (hash >> 32)) % (TOPIC_BITS - 1));
}

/*
 * EndsPrefix tells whether a prefix of a topic that ends in this byte has a bit.  In
 * every encoding of a server such a byte is a character of its own.
 */
static bool
EndsPrefix(char byte)
{
	return byte != '\0' && strchr(".:/-_,;|#@", byte) != NULL;
}

void
TopicSetAddTopic(TopicSet *set, const text *topic)
{
	const char *bytes = VARDATA_ANY(topic);
	int length = VARSIZE_ANY_EXHDR(topic);
	uint64 hash = HASH_BASIS;

	SetBit(set, EVERYTHING);
	for (int i = 0; i < length; i++)
	{
		hash = HashByte(hash, bytes[i]);
		if (EndsPrefix(bytes[i]))
			SetBit(set, BitOf(hash, false));
	}
	SetBit(set, BitOf(hash, true));
}

static uint32
BitOfPattern(const text *pattern)
{
	const char *bytes = VARDATA_ANY(pattern);
	int length = VARSIZE_ANY_EXHDR(pattern);
	uint64 hash = HASH_BASIS;
	uint32 prefix = EVERYTHING;

	for (int i = 0; i < length; i++)
	{
		if (bytes[i] == '*')
			return prefix;
		if (bytes[i] == '\\' && i + 1 < length)
			i++;
		hash = HashByte(hash, bytes[i]);
		if (EndsPrefix(bytes[i]))
			prefix = BitOf(hash, false);
	}
	return BitOf(hash, true);
}

/*
 * TopicSetFromPatterns makes the set of what any of the patterns, a text[] without NULLs, can
 * match.
 */
void
TopicSetFromPatterns(TopicSet *set, ArrayType *patterns)
{
	Datum *values;
	int count;

	memset(set, 0, sizeof(TopicSet));
	deconstruct_array(patterns, TEXTOID, -1, false, TYPALIGN_INT, &values, NULL, &count);
	for (int i = 0; i < count; i++)
		SetBit(set, BitOfPattern(DatumGetTextPP(values[i])));
}

bool
TopicSetsMeet(const TopicSet *a, const TopicSet *b)
{
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		if ((a->words[word] & b->words[word]) != 0)
			return true;
	}
	return false;
}
