/*-------------------------------------------------------------------------
 *
 * topicset.c
 *	  Sets of topics, and of those that patterns mean, as bits.
 *
 * A set tells which subscriptions an event may be for, where there is no transaction
 * to look at patterns: in shared memory.  If a pattern means a topic, the sets of the
 * two meet; they may also meet where it does not, which costs a look in vain.
 *
 * A topic has a bit for itself, one for each of its beginnings that ends in a
 * punctuation mark, such as "order." of "order.placed", and the bit EVERYTHING.  A
 * pattern has one bit: without "*", that of the topic that it means; otherwise that of
 * the longest such beginning before its first "*", or EVERYTHING if there is none.
 *
 * Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "compat.h"
#include "topicset.h"

/* The bit that all topics have. */
#define EVERYTHING 0

/* A hash that can be had of every beginning on the way: FNV-1a. */
#define HASH_BEGIN UINT64CONST(14695981039346656037)
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
 * BitOf returns the bit of what was hashed, a topic or a beginning.  It is never
 * EVERYTHING.
 */
static uint32
BitOf(uint64 hash, bool isTopic)
{
	hash = HashByte(hash, isTopic ? 't' : 'b');
	return 1 + (uint32) ((hash ^ (hash >> 32)) % (TOPIC_BITS - 1));
}

/*
 * EndsBeginning tells whether a beginning of a topic that ends in this byte has a bit.
 * In every encoding of a server such a byte is a character of its own.
 */
static bool
EndsBeginning(char byte)
{
	return byte != '\0' && strchr(".:/-_,;|#@", byte) != NULL;
}

/*
 * TopicSetAddTopic adds the bits of a topic.
 */
void
TopicSetAddTopic(TopicSet *set, const text *topic)
{
	const char *bytes = VARDATA_ANY(topic);
	int length = VARSIZE_ANY_EXHDR(topic);
	uint64 hash = HASH_BEGIN;

	SetBit(set, EVERYTHING);
	for (int i = 0; i < length; i++)
	{
		hash = HashByte(hash, bytes[i]);
		if (EndsBeginning(bytes[i]))
			SetBit(set, BitOf(hash, false));
	}
	SetBit(set, BitOf(hash, true));
}

/*
 * BitOfPattern returns the bit of a pattern.
 */
static uint32
BitOfPattern(const text *pattern)
{
	const char *bytes = VARDATA_ANY(pattern);
	int length = VARSIZE_ANY_EXHDR(pattern);
	uint64 hash = HASH_BEGIN;
	uint32 beginning = EVERYTHING;

	for (int i = 0; i < length; i++)
	{
		if (bytes[i] == '*')
			return beginning;
		if (bytes[i] == '\\' && i + 1 < length)
			i++;
		hash = HashByte(hash, bytes[i]);
		if (EndsBeginning(bytes[i]))
			beginning = BitOf(hash, false);
	}
	return BitOf(hash, true);
}

/*
 * TopicSetFromPatterns makes the set of what any of the patterns may mean.
 */
void
TopicSetFromPatterns(TopicSet *set, const TopicPatterns *patterns)
{
	memset(set, 0, sizeof(TopicSet));
	for (int i = 0; i < patterns->count; i++)
		SetBit(set, BitOfPattern(patterns->patterns[i]));
}

/*
 * TopicSetsMeet tells whether two sets have a bit in common.
 */
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

/*
 * TopicSetAddAll adds another set, and returns whether that brought anything new.
 */
bool
TopicSetAddAll(TopicSet *set, const TopicSet *more)
{
	uint64 added = 0;

	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		added |= more->words[word] & ~set->words[word];
		set->words[word] |= more->words[word];
	}
	return added != 0;
}
