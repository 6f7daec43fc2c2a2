-- ---------------------------------------------------------------------------
-- Settings of the database and of scopes: configure()
-- ---------------------------------------------------------------------------

-- The pattern "*" is the database.  Of several patterns that match a scope, that with the most
-- characters besides "*" applies.
CREATE TABLE idempotency.configuration (
	name text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	value text NOT NULL,
	literals integer GENERATED ALWAYS AS (length(regexp_replace(scope, E'\\\\(.)|\\*', E'\\1', 'g'))) STORED,
	PRIMARY KEY (name, scope)
);
COMMENT ON TABLE idempotency.configuration IS 'what configure() has stored; read it through idempotency.settings';
COMMENT ON COLUMN idempotency.configuration.name IS 'the setting, without "idempotency."';
COMMENT ON COLUMN idempotency.configuration.scope IS 'a pattern of scopes; *: the whole database';
COMMENT ON COLUMN idempotency.configuration.value IS 'the value';
COMMENT ON COLUMN idempotency.configuration.literals IS 'number of characters of the pattern besides *: the greatest applies';
COMMENT ON INDEX idempotency.configuration_pkey IS 'one value per setting and pattern';

CREATE VIEW idempotency.settings AS
	SELECT s.name, s.scope, s.value
	FROM idempotency.configuration AS s, (SELECT) AS read_only
	ORDER BY s.name, s.literals DESC, s.scope;
COMMENT ON VIEW idempotency.settings IS 'what configure() has stored; of the patterns that match a scope, the first applies';
COMMENT ON COLUMN idempotency.settings.name IS 'the setting, without "idempotency."';
COMMENT ON COLUMN idempotency.settings.scope IS 'a pattern of scopes; *: the whole database';
COMMENT ON COLUMN idempotency.settings.value IS 'the value';

CREATE FUNCTION idempotency_internal.setting_name(name text)
	RETURNS text
	LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	names CONSTANT text[] := '{retention,wait,max_response_size,max_payload_size,final_errors,documentation,outbox_retention}';
BEGIN
	name := regexp_replace(name, '^idempotency[.]', '');
	IF (name = ANY (names)) IS NOT TRUE THEN
		PERFORM idempotency_internal.raise('22023', format('unrecognized setting "%s"', name), NULL,
			format('Pass one of %s.', array_to_string(names, ', ')));
	END IF;
	RETURN name;
END
$$;
COMMENT ON FUNCTION idempotency_internal.setting_name(text) IS 'the name of a setting that configure() can store, or 22023';

-- Every change of the table is checked, also one without configure(), such as a restore.
CREATE FUNCTION idempotency_internal.apply_settings()
	RETURNS trigger
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres'
AS $$
DECLARE
	s idempotency.configuration;
BEGIN
	PERFORM idempotency_internal.check_transaction('configure');
	-- portable only
	IF EXISTS (SELECT FROM pg_settings AS g WHERE g.name = 'idempotency.retention' AND g.short_desc IS NOT NULL) THEN
		RAISE WARNING 'the settings of the library idempotency precede those of idempotency.configure()' USING
			HINT = 'Remove the library from shared_preload_libraries, session_preload_libraries and local_preload_libraries.';
	END IF;
	-- both editions
	FOR s IN SELECT * FROM idempotency.configuration AS e ORDER BY e.name, e.scope LOOP
		PERFORM idempotency_internal.check_name('scope', s.scope);
		IF s.scope !~ E'^(\x3F:\\\\.|[^\\\\])*$' THEN
			PERFORM idempotency_internal.raise('22023', 'pattern of scopes ends in a backslash', NULL,
				'A backslash escapes the next character; write two for one.');
		ELSIF s.literals > 0 AND idempotency_internal.setting_name(s.name) <> ALL ('{retention,wait,max_response_size}') THEN
			PERFORM idempotency_internal.raise('22023', format('setting "%s" cannot depend on a scope', s.name), NULL,
				'Omit the scope; only retention, wait and max_response_size can have one.');
		ELSIF s.value = '' THEN
			PERFORM idempotency_internal.raise('22023', format('value of setting "%s" is empty', s.name), NULL,
				'Pass NULL to remove a stored value.');
		END IF;
		PERFORM idempotency_internal.check_setting(idempotency_internal.setting_name(s.name), s.value);
	END LOOP;
	-- extension only
	PERFORM idempotency_internal.forget_settings();
	-- portable only
	PERFORM idempotency_internal.write_settings();
	-- both editions
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION idempotency_internal.apply_settings() IS 'trigger: check the stored settings, and apply them in all sessions';
CREATE TRIGGER apply_settings AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON idempotency.configuration
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.apply_settings();
ALTER TABLE idempotency.configuration ENABLE ALWAYS TRIGGER apply_settings;
COMMENT ON TRIGGER apply_settings ON idempotency.configuration IS 'stored settings are valid, and apply at once';

CREATE FUNCTION idempotency.configure(name text, value text, scope text DEFAULT '*')
	RETURNS text
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	previous text;
BEGIN
	name := idempotency_internal.setting_name(name);
	PERFORM idempotency_internal.check_name('scope', scope);
	PERFORM idempotency_internal.check_transaction('configure');
	LOCK TABLE idempotency.configuration IN SHARE ROW EXCLUSIVE MODE;
	SELECT s.value INTO previous FROM idempotency.configuration AS s WHERE s.name = configure.name AND s.scope = configure.scope;
	IF value IS NULL THEN
		DELETE FROM idempotency.configuration AS s WHERE s.name = configure.name AND s.scope = configure.scope;
	ELSE
		INSERT INTO idempotency.configuration (name, scope, value) VALUES (name, scope, value)
		ON CONFLICT ON CONSTRAINT configuration_pkey DO UPDATE SET value = excluded.value;
	END IF;
	RAISE LOG 'idempotency.configure() by role "%": setting "%", scope "%", %', coalesce(nullif(current_setting('role'), 'none'), session_user),
		name, scope, CASE WHEN value IS NULL THEN 'removed' ELSE format('value "%s"', value) END;
	RETURN previous;
END
$$;
COMMENT ON FUNCTION idempotency.configure(text, text, text) IS
	'store a setting for the database, or for the scopes that match a pattern; NULL removes it; returns the value stored before';

CREATE FUNCTION idempotency.setting(name text, scope text DEFAULT NULL)
	RETURNS text
	LANGUAGE plpgsql STABLE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	value text;
BEGIN
	name := idempotency_internal.setting_name(name);
	PERFORM idempotency_internal.check_name('scope', scope) WHERE scope IS NOT NULL;
	-- portable only
	PERFORM idempotency_internal.check_prefix(scope, scope) WHERE scope IS NOT NULL;
	-- both editions
	value := idempotency_internal.setting(name, coalesce(scope, ''));
	-- portable only
	IF value = '' THEN
		RETURN idempotency_internal.default_setting(name);
	END IF;
	-- both editions
	PERFORM idempotency_internal.check_setting(name, value);
	RETURN value;
END
$$;
COMMENT ON FUNCTION idempotency.setting(text, text) IS
	'the value of a setting that applies in this session, to a scope if one is given';

