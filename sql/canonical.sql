--
-- canonical(): RFC 8785, but with exact numbers
--
SET client_encoding = 'UTF8';
\set SHOW_CONTEXT never

--
-- The reference vectors of RFC 8785 (those of its author's test suite, and the
-- example of its section 3.2.3)
--
CREATE TEMP TABLE vector (name text, input text, expected text);
INSERT INTO vector VALUES
('arrays', $$[
  56,
  {
    "d": true,
    "10": null,
    "1": [ ]
  }
]$$, $$[56,{"1":[],"10":null,"d":true}]$$),
('french', $${
  "peach": "This sorting order",
  "péché": "is wrong according to French",
  "pêche": "but canonicalization MUST",
  "sin":   "ingnore locale"
}$$, $${"peach":"This sorting order","péché":"is wrong according to French","pêche":"but canonicalization MUST","sin":"ingnore locale"}$$),
('structures', $${
  "1": {"f": {"f": "hi","F": 5} ,"\n": 56.0},
  "10": { },
  "": "empty",
  "a": { },
  "111": [ {"e": "yes","E": "no" } ],
  "A": { }
}$$, $${"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}$$),
('unicode', $${
  "Unnormalized Unicode":"A\u030a"
}$$, E'{"Unnormalized Unicode":"A\u030a"}'),
('unicode, another', $${
  "Unnormalized Unicode":"\u1e0d\u0307"
}$$, E'{"Unnormalized Unicode":"\u1e0d\u0307"}'),
('values', $${
  "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}$$, $${"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}$$),
('weird', $${
  "\u20ac": "Euro Sign",
  "\r": "Carriage Return",
  "\u000a": "Newline",
  "1": "One",
  "\u0080": "Control\u007f",
  "\ud83d\ude02": "Smiley",
  "\u00f6": "Latin Small Letter O With Diaeresis",
  "\ufb33": "Hebrew Letter Dalet With Dagesh",
  "</script>": "Browser Challenge"
}$$, E'{"\\n":"Newline","\\r":"Carriage Return","1":"One","</script>":"Browser Challenge","\u0080":"Control\u007f",'
	'"\u00f6":"Latin Small Letter O With Diaeresis","\u20ac":"Euro Sign","\U0001f602":"Smiley",'
	'"\ufb33":"Hebrew Letter Dalet With Dagesh"}'),
('section 3.2.3', $${
  "\u20ac": "Euro Sign",
  "\r": "Carriage Return",
  "\ufb33": "Hebrew Letter Dalet With Dagesh",
  "1": "One",
  "\ud83d\ude00": "Emoji: Grinning Face",
  "\u0080": "Control",
  "\u00f6": "Latin Small Letter O With Diaeresis"
}$$, E'{"\\r":"Carriage Return","1":"One","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis",'
	'"\u20ac":"Euro Sign","\U0001f600":"Emoji: Grinning Face","\ufb33":"Hebrew Letter Dalet With Dagesh"}');

-- The one vector that differs by our number rule is "values": it has
-- 333333333.33333329, which RFC 8785 rounds to the nearest double.
SELECT name, idempotency.canonical(input) = expected AS as_rfc_8785,
	CASE WHEN idempotency.canonical(input) IS DISTINCT FROM expected THEN idempotency.canonical(input) END AS instead
FROM vector;
SELECT name, idempotency.canonical(input) = replace(expected, '333333333.3333333', '333333333.33333329') AS as_expected
FROM vector WHERE name = 'values';

-- Canonical input is unchanged.
SELECT count(*) FROM vector
WHERE idempotency.canonical(idempotency.canonical(input)) IS DISTINCT FROM idempotency.canonical(input);

--
-- Numbers
--

-- RFC 8785, appendix B: these numbers are in canonical form already.
SELECT number, idempotency.canonical(number) AS instead
FROM unnest(ARRAY['0', '5e-324', '-5e-324', '1.7976931348623157e+308', '-1.7976931348623157e+308',
	'9007199254740992', '-9007199254740992', '295147905179352830000', '9.999999999999997e+22', '1e+23',
	'1.0000000000000001e+23', '999999999999999700000', '999999999999999900000', '1e+21',
	'9.999999999999997e-7', '0.000001', '333333333.3333332', '333333333.33333325', '333333333.3333333',
	'333333333.3333334', '333333333.33333343', '-0.0000033333333333333333', '1424953923781206.2']) AS number
WHERE idempotency.canonical(number) IS DISTINCT FROM number;

-- numbers.csv holds 700 doubles as ECMAScript prints them; none differs.
\set numbers `cat "$PG_ABS_SRCDIR/test/numbers.csv"`
CREATE TEMP TABLE sample AS
SELECT split_part(line, ',', 1) AS input, split_part(line, ',', 2) AS expected
FROM string_to_table(:'numbers', E'\n') AS line;
SELECT count(*), count(DISTINCT input) AS distinct,
	count(*) FILTER (WHERE idempotency.canonical(input) IS DISTINCT FROM expected) AS different,
	count(*) FILTER (WHERE idempotency.canonical(expected) IS DISTINCT FROM expected) AS not_stable
FROM sample;
SELECT input, expected, idempotency.canonical(input) FROM sample
WHERE idempotency.canonical(input) IS DISTINCT FROM expected LIMIT 10;

-- Equal values give equal text, whatever their spelling.
SELECT input, idempotency.canonical(input)
FROM unnest(ARRAY['1', '1.0', '10e-1', '0.1e1', '1.000000000000000000000000000000', '-0', '-0.0', '0e5', '100', '1e2',
	'0.1', '1E-1', '1e20', '1e21', '1000000000000000000000', '0.000001', '1e-6', '0.0000001', '-1.50e-7',
	'123456789012345678901', '0.12e-5']) AS input;

-- Where ECMAScript would round, canonical() keeps all digits.
SELECT input, idempotency.canonical(input)
FROM unnest(ARRAY['333333333.33333329', '9007199254740993', '0.10000000000000000000001', '12345678901234567890.1',
	'9.999999999999999e22', '100000000000000000000001', '1.00000000000000001e-7', '-123456789.123456789e-17']) AS input;
SELECT input, length(idempotency.canonical(input)), idempotency.canonical(input) !~ 'e' AS plain,
	idempotency.canonical(input)::numeric = input::numeric AS same_value
FROM unnest(ARRAY['2e-324', '3e-324', '4.9e-324', '-5.1e-324', '2.47e-324', '1.7976931348623159e308', '1e309', '-1e399',
	'1e-330']) AS input;

-- Of 16 or 17 digits, ECMAScript prints those that no shorter decimal replaces, neither the next
-- below nor the next above, and no nearer one; at a power of two, the nearest is another double.
SELECT what, input, idempotency.canonical(input) = input AS as_ecmascript
FROM (VALUES
	('below', '2.1762903913299281e+40'), ('below', '9.678813024637401e+94'), ('below', '8.933359841524431e-9'),
	('above', '1.9059995763465108e-8'), ('above', '9.053807410603489e-77'), ('above', '8.023725267710589e-9'),
	('nearer', '9.988749839349832e-9'), ('nearer', '6.090721915585038e-8'),
	('power of two', '6.070840288205404e+82'), ('power of two', '7.854549544476363e-90')) AS v (what, input);

-- A number has at most 400 digits in plain notation, as PostgreSQL prints it.
CREATE FUNCTION pg_temp.digits(input text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RETURN length(idempotency.canonical(input));
EXCEPTION WHEN numeric_value_out_of_range THEN
	RETURN SQLERRM;
END
$$;
SELECT what, pg_temp.digits(input) AS as_text, pg_temp.digits('[{"a":' || input || '}]') AS inside
FROM (VALUES
	(1, '400 digits', repeat('7', 400)), (2, '401', repeat('7', 401)),
	(3, '400 with zeros', '-7e399'), (4, '401', '-7e400'), (5, 'the largest', '1e131071'),
	(6, '400 with a fraction', '123456789012345678901e-399'), (7, '401', '123456789012345678901e-400'), (8, 'the smallest', '1e-16383'),
	(9, '200 and 200', repeat('12', 100) || '.' || repeat('34', 100)), (10, '200 and 201', repeat('12', 100) || '.' || repeat('34', 100) || '5'),
	(11, '400 with zeros at the end', '1.' || repeat('0', 399)), (12, '401', '1.' || repeat('0', 400)),
	(13, 'zero with 400', '0e-399'), (14, '401', '0e-400'), (15, 'the longest zero', '-0.0e-16382')) AS v (n, what, input)
ORDER BY n;
SELECT idempotency.fingerprint('{"a": 1e400}');
SELECT outcome FROM idempotency.claim('canonical', 'k', '{"a": 1e400}');
SELECT outcome FROM idempotency.claim('canonical', 'k', '{"a": 1e400}'::jsonb, lease => '1 min');
-- Equal values give equal text, and different values different text.
SELECT count(*), count(DISTINCT idempotency.canonical(input)), min(idempotency.canonical(input))
FROM unnest(ARRAY['1e300', '10e299', '0.1e301', '1' || repeat('0', 300), '1.000e300', '1' || repeat('0', 300) || '.00', '1e+300']) AS input;
SELECT count(*), count(DISTINCT idempotency.canonical(input)), min(idempotency.canonical(input))
FROM unnest(ARRAY['-1.5e-300', '-15e-301', '-0.' || repeat('0', 299) || '15', '-0.00015e-296']) AS input;
SELECT count(*), count(DISTINCT idempotency.canonical(input))
FROM unnest(ARRAY['1e399', '1.1e399', '1e398', '-1e399', '1e-131', repeat('9', 400), '9' || repeat('0', 398) || '1']) AS input;
-- Random digits and exponents, in two spellings each: numbers that are equal as numeric
-- give the same text, and the text parses to the same number.
CREATE TEMP TABLE wide AS
SELECT sign || digits || 'e' || exponent AS a,
	sign || left(digits, 1) || '.' || substr(digits, 2) || repeat('0', 1 + i % 5) || 'E' || exponent + length(digits) - 1 AS b
FROM (
	SELECT i, CASE WHEN i % 3 = 0 THEN '-' ELSE '' END AS sign,
		(1 + i % 9) || left(translate(md5(i::text) || md5((-i)::text), 'abcdef', '012345'), i % 40) AS digits,
		(i * 7919 % 701) - 350 AS exponent
	FROM generate_series(1, 701) AS i) AS s;
SELECT count(*), count(*) FILTER (WHERE text = idempotency.canonical(b)) AS same,
	count(*) FILTER (WHERE text::numeric = a::numeric) AS exact, count(*) FILTER (WHERE idempotency.canonical(text) = text) AS stable,
	count(DISTINCT a::numeric) = count(DISTINCT text) AS distinct,
	count(*) FILTER (WHERE text ~ 'e' AND length(text) < 100) > 150 AS with_exponents
FROM (SELECT a, b, idempotency.canonical(a) AS text FROM wide OFFSET 0) AS w;

-- Numbers outside the range of numeric, in every spelling.
\set VERBOSITY sqlstate
SELECT idempotency.canonical('1e131072');
SELECT idempotency.canonical('1e-16384');
SELECT idempotency.canonical('1e200000');
SELECT idempotency.canonical('1e-20000');
SELECT idempotency.canonical('1' || repeat('0', 131072));
SELECT idempotency.canonical('0.' || repeat('0', 16383) || '1');
SELECT idempotency.canonical('1e1000000000000');
\set VERBOSITY default

--
-- Strings
--
SELECT idempotency.canonical(json_build_array(string_agg(chr(i), '' ORDER BY i))) FROM generate_series(1, 126) AS i;
SELECT idempotency.canonical('["\u00e9\ud83d\ude02", "é😂", "\/", "\u003c\u0022\u005c"]') = '["é😂","é😂","/","<\"\\"]' AS fewest_escapes;
SELECT idempotency.canonical('"\u007f"') = E'"\u007f"' AS delete_stays, idempotency.canonical('"\u2028"') = E'"\u2028"' AS separator_stays;

--
-- Objects: sorted by UTF-16 code units; the last duplicate name wins
--
SELECT idempotency.canonical('{"b":1, "a":2, "aa":3, "":4, "B":5, "10":6, "9":7}');
SELECT idempotency.canonical('{"a":1, "b":2, "a":3}');
SELECT idempotency.canonical('{"a":{"z":1,"z":2}, "a":{"y":{"d":1,"c":[{"f":1,"e":2}]}}}');
SELECT idempotency.canonical('{"\uffff":8, "\ud83d\ude02":5, "\ue000":6, "\uefff":6.5, "\uf000":7, "\ud7ff":3, "\ud800\udc00":4,
	"\u00ff":2, "z":1, "\udbff\udfff":5.5}')
	= E'{"z":1,"\u00ff":2,"\ud7ff":3,"\U00010000":4,"\U0001f602":5,"\U0010ffff":5.5,"\ue000":6,"\uefff":6.5,"\uf000":7,"\uffff":8}'
	AS sorted;
SELECT idempotency.canonical('{"\ud83d\ude02b":2, "\ud83d\ude02":1, "\ud83d\ude02\ue000":4, "\ud83d\ude02\ud83d\ude02":3}')
	= E'{"\U0001f602":1,"\U0001f602b":2,"\U0001f602\U0001f602":3,"\U0001f602\ue000":4}' AS sorted;

--
-- Scalars, empty containers, white space, and every type accepted as JSON
--
SELECT idempotency.canonical(' null ') AS null, idempotency.canonical('true') AS true, idempotency.canonical('"x"') AS string,
	idempotency.canonical('[ ]') AS array, idempotency.canonical(E'\n{\t}\r\n') AS object, idempotency.canonical('[[[]],{},[1]]') AS nested;
SELECT idempotency.canonical('{"b": 1.0, "a": 2}'::json) AS json, idempotency.canonical('{"b": 1.0, "a": 2}'::jsonb) AS jsonb,
	idempotency.canonical('{"b": 1.0, "a": 2}'::text) AS text, idempotency.canonical('{"b": 1.0, "a": 2}'::varchar) AS varchar,
	idempotency.canonical(NULL) IS NULL AS strict;

--
-- Input that is not JSON, or that jsonb refuses
--
\set VERBOSITY sqlstate
SELECT idempotency.canonical('');
SELECT idempotency.canonical('{"a":1,}');
SELECT idempotency.canonical('NaN');
SELECT idempotency.canonical('"\u0000"');
SELECT idempotency.canonical('{"\u0000":1}'::json);
SELECT idempotency.canonical('"\ud800"');
\set VERBOSITY default

--
-- Deep nesting: correct, or refused by the server's own limit
--
CREATE FUNCTION pg_temp.deep(beginning text, middle text, ending text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	document text := repeat(beginning, 10000) || middle || repeat(ending, 10000);
BEGIN
	RETURN CASE WHEN idempotency.canonical(document) = document THEN 'right' ELSE 'wrong' END;
EXCEPTION WHEN statement_too_complex THEN
	RETURN 'refused';
END
$$;
SELECT pg_temp.deep('[', '', ']') IN ('right', 'refused') AS arrays,
	pg_temp.deep('{"a":', '1', '}') IN ('right', 'refused') AS objects,
	pg_temp.deep('[{"a":', '[]', ',"b":null}]') IN ('right', 'refused') AS both;
SET max_stack_depth = '100kB';
SELECT pg_temp.deep('[', '', ']') AS arrays, pg_temp.deep('{"a":', '1', '}') AS objects;
RESET max_stack_depth;
SELECT idempotency.canonical(repeat('[', 3000) || repeat(']', 3000)) = repeat('[', 3000) || repeat(']', 3000) AS right;

-- A name or a value that looks like the text around it.
SELECT idempotency.canonical('[{"z\": b": {"x": [["a\": c", "d"], "{", "}", "], [", ", "]}, "a": "y\": z", "B": {}, "{\"": {"\\": [{}, []]}, "\\\"": 1.50}]');
SELECT idempotency.canonical(d) = idempotency.canonical(d::jsonb) AS same, idempotency.canonical(d)
FROM (VALUES ('{"b": {"y": {"q": 1, "p": [2.0, {"n": 1, "m": null}]}, "x": []}, "a": [[{"d": 1, "c": 2}], {}], "aa": {"\u0001": "\u0002", "": 0}}')) AS v (d);

--
-- Wide: 20,000 members in reverse order
--
SELECT idempotency.canonical('{' || string_agg(format('"%s": %s', lpad(i::text, 6, '0'), i), ', ' ORDER BY i DESC) || '}')
	= '{' || string_agg(format('"%s":%s', lpad(i::text, 6, '0'), i), ',' ORDER BY i) || '}' AS right
FROM generate_series(0, 19999) AS i;

-- Many levels, opened and closed again.
SELECT idempotency.canonical('[' || string_agg(repeat('[', 40) || i || repeat(']', 40), ' , ' ORDER BY i) || ']')
	= '[' || string_agg(repeat('[', 40) || i || repeat(']', 40), ',' ORDER BY i) || ']' AS right
FROM generate_series(1, 100) AS i;
