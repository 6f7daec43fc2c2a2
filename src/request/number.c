/*-------------------------------------------------------------------------
 *
 * request/number.c
 *	  The canonical text of a number: RFC 8785, but exact.
 *
 * RFC 8785 reads every number as a double and prints it as ECMAScript does; then amounts
 * with twenty digits would share a fingerprint.  Here a number has ECMAScript's form if
 * that is the same value, and otherwise all its digits, in plain notation.  Each form,
 * read as a decimal, is the value itself, so two values never share a form.  A number
 * that the server prints with more than 400 digits is refused: 1e131071 must not fill
 * the memory.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "fmgr.h"
#include "port/pg_bswap.h"
#include "utils/fmgrprotos.h"

#include "base/compat.h"
#include "request/request.h"

/* The most digits of plain notation: more than any double has. */
#define MAX_DIGITS 400

/* The format of numeric_send(): four fields of 16 bits, then groups of four digits. */
#define WIRE_FIELDS 4
#define WIRE_NEGATIVE 0x4000
#define GROUP_DIGITS 4

/* A number: sign, digits without zeros at either end, and decimal point. */
typedef struct Number
{
	bool negative;
	char *buffer; /* palloc'ed; contains the digits */
	char *digits;
	int count;
	int point; /* the decimal exponent of 0.DIGITS */
	int scale; /* digits after the point in plain notation, with zeros at the end */
} Number;

/* The most decimal digits that a double needs. */
#define MAX_SHORTEST_DIGITS 17

/* Two decimals of this many digits are never the same normal double. */
#define SAFE_DIGITS 15

/* Decimal exponents (of 0.DIGITS) within which every double is normal. */
#define MIN_NORMAL_POINT (-306)
#define MAX_NORMAL_POINT 308

/* Decimal points (of 0.DIGITS) within which ECMAScript writes no exponent. */
#define MIN_PLAIN_POINT (-5)
#define MAX_PLAIN_POINT 21

/*
 * ReadDecimal returns the double nearest to mantissa times ten to the
 * exponent; infinity above and zero below the range of doubles.
 */
static double
ReadDecimal(uint64 mantissa, int exponent)
{
	char buffer[64];

	/* the server keeps LC_NUMERIC at C, and there is no decimal point anyway */
	snprintf(buffer, sizeof(buffer), UINT64_FORMAT "e%d", mantissa, exponent);
	return strtod(buffer, NULL);
}

/*
 * IsShortest returns whether ECMAScript prints exactly the digits of this nonzero number
 * for the double nearest to it: no decimal with fewer digits reads as the same double, and
 * none that does with as many is nearer to it.
 *
 * The decimals that read as one double are an interval, so of those with fewer digits
 * only the two neighbours with one digit less are compared.  The server's shortest output
 * of the double does not suffice, since it never prints a decimal half-way between two
 * doubles, as ECMAScript does with 1e+23.
 */
static bool
IsShortest(const Number *number)
{
	int exponent = number->point - number->count;
	char nearest[64];
	uint64 mantissa = 0;
	double value;

	if (number->count > MAX_SHORTEST_DIGITS)
		return false;
	if (number->count <= SAFE_DIGITS && number->point >= MIN_NORMAL_POINT &&
		number->point <= MAX_NORMAL_POINT)
		return true;

	for (int i = 0; i < number->count; i++)
		mantissa = mantissa * 10 + (number->digits[i] - '0');
	value = ReadDecimal(mantissa, exponent);
	if (value == 0 || isinf(value))
		return false;
	if (number->count > 1 && (ReadDecimal(mantissa / 10, exponent + 1) == value ||
							  ReadDecimal(mantissa / 10 + 1, exponent + 1) == value))
		return false;

	/* At a power of two, the nearest decimal with as many digits can read as another double */
	snprintf(nearest, sizeof(nearest), "%.*e", number->count - 1, value);
	if (strtod(nearest, NULL) != value)
		return true;
	return nearest[0] == number->digits[0] &&
		   strncmp(nearest + 2, number->digits + 1, number->count - 1) == 0;
}

/*
 * WireField returns one of the 16-bit fields of numeric_send().
 */
static uint16
WireField(const char *wire, int field)
{
	uint16 value;

	memcpy(&value, wire + field * sizeof(value), sizeof(value));
	return pg_ntoh16(value);
}

/*
 * ReadNumeric stores sign, digits and point of a numeric, the digits palloc'ed in the
 * current context.  Memory is proportional to the number of digits stored, not to the
 * value.  Zero has no digits.
 */
static void
ReadNumeric(Numeric numeric, Number *number)
{
	bytea *sent = DatumGetByteaP(DirectFunctionCall1(numeric_send, NumericGetDatum(numeric)));
	const char *wire = VARDATA(sent);
	int groups = WireField(wire, 0);
	int zeros = 0;
	int count = groups * GROUP_DIGITS;

	number->buffer = palloc(count + 1);
	for (int i = 0; i < groups; i++)
		snprintf(number->buffer + i * GROUP_DIGITS, GROUP_DIGITS + 1, "%04d",
				 (int) WireField(wire, WIRE_FIELDS + i));
	while (zeros < count && number->buffer[zeros] == '0')
		zeros++;
	while (count > zeros && number->buffer[count - 1] == '0')
		count--;

	number->negative = WireField(wire, 2) == WIRE_NEGATIVE;
	number->digits = number->buffer + zeros;
	number->count = count - zeros;
	number->point = ((int16) WireField(wire, 1) + 1) * GROUP_DIGITS - zeros;
	number->scale = WireField(wire, 3);
	pfree(sent);
}

/*
 * HasExponent returns whether the canonical form of a nonzero number has an exponent.
 * From 1e-6 to below 1e21 ECMAScript prints plain notation, which is exact; beyond, its
 * exponent form is used if that is the same value.
 */
static bool
HasExponent(const Number *number)
{
	if (number->point >= MIN_PLAIN_POINT && number->point <= MAX_PLAIN_POINT)
		return false;
	return IsShortest(number);
}

/*
 * AppendZeros appends "count" zeros; none if that is negative.
 */
static void
AppendZeros(StringInfo out, int count)
{
	for (; count > 0; count--)
		appendStringInfoChar(out, '0');
}

/*
 * AppendPlain appends a nonzero number in plain notation.
 */
static void
AppendPlain(StringInfo out, const Number *number)
{
	int before = Min(Max(number->point, 0), number->count); /* digits before the point */

	if (before == 0)
		appendStringInfoChar(out, '0');
	appendBinaryStringInfo(out, number->digits, before);
	AppendZeros(out, number->point - number->count);
	if (before == number->count)
		return;
	appendStringInfoChar(out, '.');
	AppendZeros(out, -number->point);
	appendBinaryStringInfo(out, number->digits + before, number->count - before);
}

/*
 * AppendWithExponent appends a nonzero number as one digit, a point, the other digits and
 * an exponent.
 */
static void
AppendWithExponent(StringInfo out, const Number *number)
{
	appendStringInfoChar(out, number->digits[0]);
	if (number->count > 1)
		appendStringInfoChar(out, '.');
	appendBinaryStringInfo(out, number->digits + 1, number->count - 1);
	appendStringInfo(out, "e%+d", number->point - 1);
}

/*
 * CheckDigits throws 22003 for a number of more than MAX_DIGITS digits in plain notation.
 */
static void
CheckDigits(const Number *number)
{
	int before = number->count == 0 ? 1 : Max(number->point, 1);

	if (before + number->scale > MAX_DIGITS)
		ereport(ERROR, (errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
						errmsg("a JSON number has more than %d digits", MAX_DIGITS),
						errdetail("The zeros that an exponent stands for count, too."),
						errhint("Pass the number as a JSON string.")));
}

/*
 * NumberAppend appends the canonical form of a number.  Throws 22003.
 */
void
NumberAppend(StringInfo out, Numeric numeric)
{
	Number number;

	ReadNumeric(numeric, &number);
	CheckDigits(&number);
	if (number.negative)
		appendStringInfoChar(out, '-');
	if (number.count == 0)
		appendStringInfoChar(out, '0');
	else if (HasExponent(&number))
		AppendWithExponent(out, &number);
	else
		AppendPlain(out, &number);
	pfree(number.buffer);
}
