<?php

// PHP's PDO. play describes requests and replies.

declare(strict_types=1);

class Session
{
    private PDO $pdo;
    private array $statements = [];

    public function __construct(string $host, private bool $prepared)
    {
        $this->pdo = new PDO(sprintf('pgsql:host=%s;port=%s;dbname=%s;user=%s', $host, getenv('PGPORT'), getenv('PGDATABASE'), getenv('PGUSER')));
        $this->pdo->setAttribute(PDO::PGSQL_ATTR_DISABLE_PREPARES, !$prepared);
    }

    /** Returns the rows of a statement, which keeps its prepared form for the next call. */
    private function query(string $sql, array $arguments): array
    {
        $statement = $this->statements[$sql] ?? $this->pdo->prepare($sql);
        if ($this->prepared) {
            $this->statements[$sql] = $statement;
        }
        foreach ($arguments as $index => [$kind, $value]) {
            $statement->bindValue($index + 1, native($kind, $value), $kind === 'bytes' ? PDO::PARAM_LOB : PDO::PARAM_STR);
        }
        $statement->execute();
        $rows = $statement->fetchAll(PDO::FETCH_NUM);
        array_walk_recursive($rows, fn (&$value) => $value = is_resource($value) ? bin2hex(stream_get_contents($value)) : $value);
        return $rows;
    }

    /** Does what a request says, and returns the rows. */
    public function answer(array $request): array
    {
        switch ($request['do']) {
            case 'begin':
                $this->pdo->beginTransaction();
                return [];
            case 'commit':
                $this->pdo->commit();
                return [];
            case 'rollback':
                if ($this->pdo->inTransaction()) {
                    $this->pdo->rollBack();
                }
                return [];
            case 'savepoint':
                $this->pdo->exec('SAVEPOINT s');
                return [];
            case 'rollback to savepoint':
                $this->pdo->exec('ROLLBACK TO SAVEPOINT s');
                return [];
        }
        $rows = $this->query($request['sql'], $request['arguments']);
        return $request['do'] === 'query json' ? array_map(fn ($row) => json_decode($row[0], true), $rows) : $rows;
    }
}

/** Returns an array as the text that PostgreSQL reads, since PDO binds no arrays. */
function array_text(array $values): string
{
    return '{' . implode(',', array_map(fn ($value) => $value === null ? 'NULL' : '"' . addcslashes((string) $value, '"\\') . '"', $values)) . '}';
}

/** Returns an argument in the type in which an application has it. */
function native(string $kind, mixed $value): mixed
{
    return match ($kind) {
        'wrapped' => json_encode($value),
        'interval' => "$value seconds",
        'bytes' => hex2bin($value),
        'texts', 'nullable texts', 'UUIDs', 'integers' => array_text($value),
        default => $value,
    };
}

set_error_handler(fn ($level, $message) => throw new ErrorException($message));
$sessions = [];
while (($line = fgets(STDIN)) !== false) {
    $request = json_decode($line, true);
    $key = json_encode([$request['session'], $request['host'], $request['prepared']]);
    try {
        $sessions[$key] ??= new Session($request['host'], $request['prepared']);
        $reply = ['rows' => $sessions[$key]->answer($request)];
    } catch (PDOException $error) {
        $reply = ['error' => $error->getCode(), 'message' => $error->getMessage()];
    } catch (Throwable $error) {
        $reply = ['error' => '', 'message' => get_class($error) . ': ' . $error->getMessage()];
    }
    echo json_encode($reply), "\n";
}
